/// The cause of a backend's error, from any library.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What can be done about a failing store or bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The same call may succeed later: the backend is busy, restarting or out of reach.
    Transient,
    /// The call was cut off and may or may not have taken effect.
    OutcomeUnknown,
    /// The same call will fail again until an operator or a developer changes something.
    Permanent,
}

/// A call of a backend failed.
#[derive(Debug, thiserror::Error)]
#[error("{doing}")]
pub struct StoreError {
    /// A fragment that reads well after "failed to": "claim from outbox_event".
    doing: String,
    kind: FaultKind,
    #[source]
    source: BoxError,
}

impl StoreError {
    /// `doing` is a fragment that reads well after "failed to".
    pub fn new(doing: impl Into<String>, kind: FaultKind, source: impl Into<BoxError>) -> Self {
        Self { doing: doing.into(), kind, source: source.into() }
    }

    /// What can be done about it.
    pub fn kind(&self) -> FaultKind {
        self.kind
    }

    /// The error and all its causes in one line, for logs and problem details.
    pub fn chain(&self) -> String {
        let mut text = format!("failed to {}", self.doing);
        let mut next: Option<&dyn std::error::Error> = Some(self.source.as_ref());
        while let Some(error) = next {
            text.push_str(": ");
            text.push_str(&error.to_string());
            next = error.source();
        }
        text
    }
}
