use sqlx::{Database, Pool, Transaction};

/// Begins a transaction. Cancelling this future leaks no open transaction into the service's pool.
///
/// sqlx tracks a transaction only after the server has confirmed its BEGIN. If the future were dropped before that, the
/// connection would return to the pool inside a transaction that nothing ends. So the BEGIN runs in a task of its own,
/// which always runs to its end.
pub(crate) async fn begin<DB: Database>(
    pool: &Pool<DB>,
    statement: Option<&'static str>,
) -> Result<Transaction<'static, DB>, sqlx::Error> {
    let pool = pool.clone();
    let begun = tokio::spawn(async move {
        match statement {
            Some(statement) => pool.begin_with(statement).await,
            None => pool.begin().await,
        }
    });
    begun.await.unwrap_or(Err(sqlx::Error::WorkerCrashed))
}
