use posthaste_core::{FaultKind, StoreError};
use sqlx::mysql::MySqlDatabaseError;

use crate::session::Failed;

/// Classes of SQLSTATE whose cause is not the statement itself: connection, transaction (deadlock).
const TRANSIENT: [&str; 2] = ["08", "40"];
/// Most of these errors have no class of their own. Resources are exhausted: disk, memory, connections. A lock was not
/// granted in time, or the row has changed since. An operator or a time limit ended the statement. The server is a
/// replica at the moment, or not yet a member of its cluster.
const ALSO_TRANSIENT: [u16; 22] = [
    1021, 1037, 1038, 1040, 1041, 1135, 1203, 1226, 1205, 1020, 1053, 1317, 1927, 1969, 3024, 4031, 1047, 1290, 1792,
    1836, 3100, 3101,
];
/// The server closed the connection, or does not know the outcome itself.
const UNANSWERED: [u16; 5] = [1053, 1180, 1317, 1927, 4031];

/// A text that its column cannot hold. Nothing was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{column} has {length} characters, more than {longest}: give a shorter one")]
#[non_exhaustive]
pub struct TooLong {
    /// The column in question.
    pub column: &'static str,
    /// How many characters were given.
    pub length: usize,
    /// How many it can hold.
    pub longest: usize,
}

impl TooLong {
    /// Checked here and not by the server, because in some SQL modes the server truncates a text that is too long.
    pub(super) fn check(column: &'static str, text: &str, longest: usize) -> Result<(), Self> {
        // No text has more characters than bytes.
        let length = if text.len() <= longest { text.len() } else { text.chars().count() };
        match length <= longest {
            true => Ok(()),
            false => Err(Self { column, length, longest }),
        }
    }
}

/// Classifies the error of a failed statement.
pub(super) fn store_error(doing: &'static str, error: sqlx::Error) -> StoreError {
    let kind = match &error {
        sqlx::Error::Database(database) => match (database.code(), number(&error)) {
            (Some(code), _) if TRANSIENT.iter().any(|class| code.starts_with(class)) => FaultKind::Transient,
            (_, Some(number)) if ALSO_TRANSIENT.contains(&number) => FaultKind::Transient,
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
        sqlx::Error::Database(database) => {
            database.code().is_none_or(|code| !code.starts_with("08"))
                && number(&error).is_none_or(|number| !UNANSWERED.contains(&number))
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
    number(error) == Some(1205)
}

/// The number of an error of the server.
pub(super) fn number(error: &sqlx::Error) -> Option<u16> {
    let error = error.as_database_error()?.try_downcast_ref::<MySqlDatabaseError>()?;
    Some(error.number())
}
