//! What the errors of PostgreSQL and MySQL have in common.

/// Defines `store_error`, `commit_error` and `doing` for a server, given its functions `is_transient` and `is_answered`,
/// which judge an error that the server itself reported.
macro_rules! server_errors {
    () => {
        /// Classifies the error of a failed statement.
        pub(super) fn store_error(doing: &'static str, error: sqlx::Error) -> StoreError {
            let is_transient = match &error {
                sqlx::Error::Database(_) => is_transient(&error),
                // `Protocol`: an earlier statement on this connection was cancelled half way. The next statement gets a
                // new connection.
                sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::Protocol(_) => {
                    true
                }
                _ => false,
            };
            let kind = if is_transient { FaultKind::Transient } else { FaultKind::Permanent };
            StoreError::new(doing, kind, error)
        }

        /// Classifies the error of a failed commit. A connection that breaks during a COMMIT may break after the server
        /// has committed.
        pub(super) fn commit_error(doing: &'static str, error: sqlx::Error) -> StoreError {
            match matches!(error, sqlx::Error::Database(_)) && is_answered(&error) {
                true => store_error(doing, error),
                false => StoreError::new(doing, FaultKind::OutcomeUnknown, error),
            }
        }

        /// Runs the work of one store method. `what` names the work in an error: it is a fragment that reads well after
        /// "failed to".
        pub(super) async fn doing<T>(
            what: &'static str,
            work: impl Future<Output = Result<T, crate::session::Failed>>,
        ) -> Result<T, StoreError> {
            work.await.map_err(|failed| match failed {
                crate::session::Failed::Statement(error) => store_error(what, error),
                crate::session::Failed::Commit(error) => commit_error(what, error),
            })
        }
    };
}
pub(crate) use server_errors;
