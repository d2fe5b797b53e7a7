use posthaste_core::{FaultKind, StoreError};

use crate::session::Failed;

/// Classes of SQLSTATE that say nothing about the statement: connection, transaction (deadlock), resources, operator
/// (shutdown, cancelled), system.
const TRANSIENT: [&str; 5] = ["08", "40", "53", "57", "58"];
/// A lock timeout; the server is a standby now; the server ended an idle transaction.
const ALSO_TRANSIENT: [&str; 3] = ["55P03", "25006", "25P03"];

/// What a failed statement means for its caller.
pub(super) fn store_error(doing: &'static str, error: sqlx::Error) -> StoreError {
    let kind = match &error {
        sqlx::Error::Database(error) => match error.code() {
            Some(code) if TRANSIENT.iter().any(|class| code.starts_with(class)) => FaultKind::Transient,
            Some(code) if ALSO_TRANSIENT.contains(&&*code) => FaultKind::Transient,
            _ => FaultKind::Permanent,
        },
        // The last one is a connection on which a statement was cut off half way: the next statement gets another.
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::Protocol(_) => {
            FaultKind::Transient
        }
        _ => FaultKind::Permanent,
    };
    StoreError::new(doing, kind, error)
}

/// What a failed commit means: a connection that was lost while it was under way may have been lost after the commit.
pub(super) fn commit_error(doing: &'static str, error: sqlx::Error) -> StoreError {
    let is_answered = match &error {
        // The server gave up the connection, or does not know itself.
        sqlx::Error::Database(error) => {
            error.code().is_none_or(|code| !["08", "57"].iter().any(|class| code.starts_with(class)) && code != "40003")
        }
        _ => false,
    };
    match is_answered {
        true => store_error(doing, error),
        false => StoreError::new(doing, FaultKind::OutcomeUnknown, error),
    }
}

/// Runs what one method of a store does. An error says what was being done: `what` is a fragment that reads well after
/// "failed to".
pub(super) async fn doing<T>(
    what: &'static str,
    work: impl Future<Output = Result<T, Failed>>,
) -> Result<T, StoreError> {
    work.await.map_err(|failed| match failed {
        Failed::Statement(error) => store_error(what, error),
        Failed::Commit(error) => commit_error(what, error),
    })
}

/// Another transaction has locked a row.
pub(super) fn is_lock_timeout(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "55P03")
}
