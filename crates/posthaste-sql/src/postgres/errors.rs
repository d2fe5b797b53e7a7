use posthaste_core::{FaultKind, StoreError};

use crate::session::Failed;

/// Classes of SQLSTATE whose cause is not the statement itself: connection, transaction (deadlock), resources, operator
/// (shutdown, cancelled), system.
const TRANSIENT: [&str; 5] = ["08", "40", "53", "57", "58"];
/// A lock timeout; the server is a standby now; the server ended an idle transaction.
const ALSO_TRANSIENT: [&str; 3] = ["55P03", "25006", "25P03"];

/// Classifies the error of a failed statement.
pub(super) fn store_error(doing: &'static str, error: sqlx::Error) -> StoreError {
    let kind = match &error {
        sqlx::Error::Database(error) => match error.code() {
            Some(code) if TRANSIENT.iter().any(|class| code.starts_with(class)) => FaultKind::Transient,
            Some(code) if ALSO_TRANSIENT.contains(&&*code) => FaultKind::Transient,
            _ => FaultKind::Permanent,
        },
        // `Protocol`: an earlier statement on this connection was cancelled half way. The next statement gets a new
        // connection.
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::Protocol(_) => {
            FaultKind::Transient
        }
        _ => FaultKind::Permanent,
    };
    StoreError::new(doing, kind, error)
}

/// Classifies the error of a failed commit. A connection that breaks during a COMMIT may break after the server has
/// committed.
pub(super) fn commit_error(doing: &'static str, error: sqlx::Error) -> StoreError {
    let is_answered = match &error {
        // The server closed the connection, or does not know the outcome itself.
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

/// Runs the work of one store method. `what` names the work in an error: it is a fragment that reads well after "failed
/// to".
pub(super) async fn doing<T>(
    what: &'static str,
    work: impl Future<Output = Result<T, Failed>>,
) -> Result<T, StoreError> {
    work.await.map_err(|failed| match failed {
        Failed::Statement(error) => store_error(what, error),
        Failed::Commit(error) => commit_error(what, error),
    })
}

/// True if the statement gave up because another transaction has locked a row.
pub(super) fn is_lock_timeout(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "55P03")
}
