use posthaste_core::{FaultKind, StoreError};

/// SQLITE_BUSY: another connection has locked the file.
const BUSY: i64 = 5;
/// SQLITE_IOERR: the disk failed.
const IO_ERROR: i64 = 10;

/// Classifies the error of a failed statement.
pub(super) fn store_error(doing: &'static str, error: sqlx::Error) -> StoreError {
    let kind = match &error {
        // A broken constraint breaks again; a locked or full database may recover.
        sqlx::Error::Database(error) if error.kind() != sqlx::error::ErrorKind::Other => FaultKind::Permanent,
        sqlx::Error::Database(_) | sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed => {
            FaultKind::Transient
        }
        _ => FaultKind::Permanent,
    };
    StoreError::new(doing, kind, error)
}

/// Runs the reads of one store method. `what` names the work in an error: it is a fragment that reads well after
/// "failed to".
pub(super) async fn doing<T>(
    what: &'static str,
    work: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, StoreError> {
    work.await.map_err(|error| store_error(what, error))
}

/// Classifies the error of a failed commit. SQLite runs in this process, so a failed commit certainly did not happen,
/// unless the disk failed or the error does not come from SQLite.
pub(super) fn commit_error(doing: &'static str, error: sqlx::Error) -> StoreError {
    match is_certain(&error) {
        true => store_error(doing, error),
        false => StoreError::new(doing, FaultKind::OutcomeUnknown, error),
    }
}

/// True if a failed commit certainly changed nothing.
pub(super) fn is_certain(error: &sqlx::Error) -> bool {
    code(error).is_some_and(|code| code != IO_ERROR)
}

/// True if another connection has locked the file.
pub(super) fn is_locked(error: &sqlx::Error) -> bool {
    code(error) == Some(BUSY)
}

/// The primary result code of SQLite, without the extended code in the upper bytes.
fn code(error: &sqlx::Error) -> Option<i64> {
    let code = error.as_database_error()?.code()?;
    code.parse::<i64>().ok().map(|code| code & 0xff)
}
