use std::ops::{Deref, DerefMut};

use sqlx::pool::PoolConnection;
use sqlx::{MySql, MySqlConnection, MySqlPool};

use crate::session::Failed;

/// A connection of the service's pool, for statements that may fail or be cancelled.
///
/// sqlx loses track of the server's answers if a statement is dropped while it is being prepared: later statements on
/// that connection then read the wrong answers, or wait for ever. So the connection returns to the pool only after
/// `finish` or `commit`. Dropping it earlier closes it, which rolls back what it had begun.
pub(super) struct Pooled {
    connection: PoolConnection<MySql>,
    is_finished: bool,
}

impl Pooled {
    pub(super) async fn acquire(pool: &MySqlPool) -> Result<Self, sqlx::Error> {
        Ok(Self { connection: pool.acquire().await?, is_finished: false })
    }

    /// Begins a transaction with this statement.
    pub(super) async fn begin(pool: &MySqlPool, statement: &'static str) -> Result<Self, sqlx::Error> {
        let mut begun = Self::acquire(pool).await?;
        sqlx::raw_sql(statement).execute(&mut *begun).await?;
        Ok(begun)
    }

    pub(super) async fn commit(mut self) -> Result<(), Failed> {
        sqlx::raw_sql("COMMIT").execute(&mut *self).await.map_err(Failed::Commit)?;
        self.finish();
        Ok(())
    }

    /// Returns the connection to the pool: its last statement has ended, and no transaction is open.
    pub(super) fn finish(mut self) {
        self.is_finished = true;
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        if !self.is_finished {
            self.connection.close_on_drop();
        }
    }
}

impl Deref for Pooled {
    type Target = MySqlConnection;

    fn deref(&self) -> &MySqlConnection {
        &self.connection
    }
}

impl DerefMut for Pooled {
    fn deref_mut(&mut self) -> &mut MySqlConnection {
        &mut self.connection
    }
}
