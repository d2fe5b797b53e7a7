use sqlx::{Database, Pool, Transaction};

/// Begins a transaction for whom may stop waiting for it.
///
/// sqlx counts a transaction from the answer to its BEGIN: dropped before that, the connection would go back to the
/// service's pool inside of one that nobody ends. A task of its own is dropped by nobody.
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
