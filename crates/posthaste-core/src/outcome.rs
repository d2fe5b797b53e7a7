use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The result of one delivery, which the sink reports exactly once.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The item is delivered.
    Delivered,
    /// Not yet: deliver it again after this time. Never counts as an attempt.
    Snoozed {
        /// The time to wait.
        wait: Duration,
    },
    /// The attempt failed.
    Failed(Failure),
}

/// The cause of a failure, which decides what happens to the item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureClass {
    /// The next attempt may succeed. Counts against the item's budget.
    Transient,
    /// No attempt can succeed. The item is dead at once.
    Permanent,
    /// The fault of a dependency (broker, registry, database). Never counts against the item.
    Outage,
}

/// Why an attempt failed, in words for an operator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// Decides if the item is retried.
    pub class: FailureClass,
    /// An HTTP status or a stable word such as `listener_error`.
    pub code: Cow<'static, str>,
    /// What went wrong, in one sentence.
    pub message: String,
    /// The underlying cause.
    pub cause: Option<String>,
    /// The delay that the receiver asked for; replaces the policy's delay.
    pub retry_after: Option<Duration>,
}

impl Failure {
    /// A failure of this class.
    pub fn new(class: FailureClass, code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self { class, code: code.into(), message: message.into(), cause: None, retry_after: None }
    }

    /// A failure after which the next attempt may succeed.
    pub fn transient(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(FailureClass::Transient, code, message)
    }

    /// A failure after which no attempt can succeed.
    pub fn permanent(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(FailureClass::Permanent, code, message)
    }

    /// A failure of a dependency.
    pub fn outage(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(FailureClass::Outage, code, message)
    }

    #[must_use]
    /// Adds the underlying cause.
    pub fn cause(mut self, cause: impl Into<String>) -> Self {
        self.cause = Some(cause.into());
        self
    }

    #[must_use]
    /// Sets the delay before the next attempt, in place of the policy's.
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

/// An error of a listener is a transient failure of its event. Types that are no [`std::error::Error`], such as
/// `anyhow::Error` and `Box<dyn std::error::Error>`, are turned into a [`Failure`] by the listener itself.
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

/// What follows from an [`Outcome`]. [`decide`](crate::decide) returns it, and the source carries it out.
///
/// Durations, not instants: the store adds them to its own clock.
#[derive(Clone, Debug, PartialEq)]
pub enum Disposition {
    /// Delivered.
    Done,
    /// `counted` retries become RETRY with one attempt more; uncounted ones with a failure become RETRY with the
    /// attempts kept; uncounted ones without (a snooze) become NEW again.
    Retry {
        /// The delay from now.
        after: Duration,
        /// True if the attempt counts against the budget.
        counted: bool,
        /// `None` for a snooze.
        failure: Option<Failure>,
    },
    /// Given up.
    Dead(Failure),
}

/// The result of a settlement, a renewal or an ack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// It is stored.
    Applied,
    /// The claim no longer belonged to this process; nothing was changed.
    LostLease,
    /// Another transaction has the row locked at this moment, or the cluster refuses the acks of this partition; nothing
    /// was changed. Try again soon.
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
