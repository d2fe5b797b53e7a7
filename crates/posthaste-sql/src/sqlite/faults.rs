use posthaste_core::{FaultKind, StoreError};

/// The code of an error of the disk, of which others are variants.
const IO_ERROR: i64 = 10;

/// What a failed statement means for whoever asked for it.
pub(super) fn store_error(doing: &'static str, error: sqlx::Error) -> StoreError {
    let kind = match &error {
        // A broken constraint breaks again; a locked or full database may recover.
        sqlx::Error::Database(error) if error.kind() != sqlx::error::ErrorKind::Other => FaultKind::Lasting,
        sqlx::Error::Database(_) | sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed => {
            FaultKind::Passing
        }
        _ => FaultKind::Lasting,
    };
    StoreError::new(doing, kind, error)
}

/// What a failed commit means. The database answers in this process, so that it did not commit is certain, unless the
/// disk failed on the way or nobody answered.
pub(super) fn commit_error(doing: &'static str, error: sqlx::Error) -> StoreError {
    let is_answered = match &error {
        sqlx::Error::Database(error) => {
            error.code().and_then(|code| code.parse::<i64>().ok()).is_some_and(|code| code & 0xff != IO_ERROR)
        }
        _ => false,
    };
    match is_answered {
        true => store_error(doing, error),
        false => StoreError::new(doing, FaultKind::OutcomeUnknown, error),
    }
}
