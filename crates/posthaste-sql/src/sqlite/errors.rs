use posthaste_core::{FaultKind, StoreError};

/// SQLITE_BUSY: another connection has locked the file.
const BUSY: i64 = 5;
/// SQLITE_IOERR: an error of the disk.
const IO_ERROR: i64 = 10;

/// What a failed statement means for its caller.
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

/// Runs what one method of a store reads. An error says what was being done: `what` is a fragment that reads well after
/// "failed to".
pub(super) async fn doing<T>(
    what: &'static str,
    work: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, StoreError> {
    work.await.map_err(|error| store_error(what, error))
}

/// What a failed commit means. The database answers in this process, so that it did not commit is certain, unless the
/// disk failed on the way or nobody answered.
pub(super) fn commit_error(doing: &'static str, error: sqlx::Error) -> StoreError {
    match is_certain(&error) {
        true => store_error(doing, error),
        false => StoreError::new(doing, FaultKind::OutcomeUnknown, error),
    }
}

/// Whether a failed commit surely left nothing behind.
pub(super) fn is_certain(error: &sqlx::Error) -> bool {
    code(error).is_some_and(|code| code != IO_ERROR)
}

/// True if another connection has locked the file.
pub(super) fn is_locked(error: &sqlx::Error) -> bool {
    code(error) == Some(BUSY)
}

/// What the database answered, without the variant that the upper bytes tell.
fn code(error: &sqlx::Error) -> Option<i64> {
    let code = error.as_database_error()?.code()?;
    code.parse::<i64>().ok().map(|code| code & 0xff)
}
