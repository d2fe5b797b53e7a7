use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What happened to one item: a sink's only statement about it.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It is done.
    Delivered,
    /// Not yet: ask again after this time. Never counts as an attempt.
    Snoozed {
        /// How long.
        wait: Duration,
    },
    /// It went wrong.
    Failed(Failure),
}

/// Whose fault a failure is, and so what it costs the item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureClass {
    /// May pass; counts against the item's budget.
    Transient,
    /// Will never pass; the item is dead at once.
    Permanent,
    /// A dependency's fault (broker, registry, database). Never counts against the item.
    Outage,
}

/// Why an attempt failed, in words that an operator reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// Whose fault it is.
    pub class: FailureClass,
    /// An HTTP status or a stable word such as `listener_error`.
    pub code: Cow<'static, str>,
    /// What went wrong, in one sentence.
    pub message: String,
    /// What lies behind it.
    pub cause: Option<String>,
    /// The other side's wish; replaces the policy's delay.
    pub retry_after: Option<Duration>,
}

impl Failure {
    /// A failure of this class.
    pub fn new(class: FailureClass, code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self { class, code: code.into(), message: message.into(), cause: None, retry_after: None }
    }

    /// One that may pass.
    pub fn transient(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(FailureClass::Transient, code, message)
    }

    /// One that will never pass.
    pub fn permanent(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(FailureClass::Permanent, code, message)
    }

    /// The fault of a dependency.
    pub fn outage(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(FailureClass::Outage, code, message)
    }

    #[must_use]
    /// Adds what lies behind it.
    pub fn cause(mut self, cause: impl Into<String>) -> Self {
        self.cause = Some(cause.into());
        self
    }

    #[must_use]
    /// Asks for a delay of its own.
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.message)?;
        match &self.cause {
            Some(cause) => write!(f, " ({cause})"),
            None => Ok(()),
        }
    }
}

/// An error of a listener is a transient failure of its event. Types that are no [`std::error::Error`], such as `anyhow::Error`
/// and `Box<dyn std::error::Error>`, are turned into a [`Failure`] by the listener itself.
impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        let failure = Failure::transient("listener_error", error.to_string());
        match error.source() {
            Some(source) => failure.cause(source.to_string()),
            None => failure,
        }
    }
}

impl From<()> for Outcome {
    fn from((): ()) -> Self {
        Outcome::Delivered
    }
}

impl<E: Into<Failure>> From<Result<(), E>> for Outcome {
    fn from(result: Result<(), E>) -> Self {
        match result {
            Ok(()) => Outcome::Delivered,
            Err(error) => Outcome::Failed(error.into()),
        }
    }
}

/// What follows from an [`Outcome`]: the answer of [`decide`](crate::decide), carried out by the source.
///
/// Durations, not instants: the store adds them to its own clock.
#[derive(Clone, Debug, PartialEq)]
pub enum Disposition {
    /// Delivered.
    Done,
    /// `counted` retries become RETRY with one attempt more; uncounted ones with a failure become RETRY with the
    /// attempts kept; uncounted ones without (a snooze) become NEW again.
    Retry {
        /// From now.
        after: Duration,
        /// Whether it counts against the budget.
        counted: bool,
        /// What went wrong, if anything did.
        failure: Option<Failure>,
    },
    /// Given up.
    Dead(Failure),
}

/// What a source recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// It is on record.
    Applied,
    /// The claim was no longer ours; nothing was changed.
    LostLease,
    /// Another transaction has locked the row just now, so nothing was changed: ask again in a moment.
    Locked,
}

impl Settled {
    /// The answer of a store that never finds a row locked.
    pub fn of(is_applied: bool) -> Self {
        match is_applied {
            true => Self::Applied,
            false => Self::LostLease,
        }
    }
}
