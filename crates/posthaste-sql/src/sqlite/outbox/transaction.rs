use std::ops::{Deref, DerefMut};

use sqlx::sqlite::SqlitePool;
use sqlx::{Connection, SqlSafeStr, Sqlite, SqliteConnection};
use tokio::runtime::Handle;

use crate::sqlite::writer_lock::{WriterLock, WriterPermit};

/// IMMEDIATE takes the lock now, where waiting is allowed, and not at the first write.
const BEGIN: &str = "BEGIN IMMEDIATE";

/// A transaction of the service that holds the writer lock. Dropped without a commit it is rolled back.
pub struct Transaction {
    /// `None` once it is ended.
    inner: Option<sqlx::Transaction<'static, Sqlite>>,
    /// Released when the transaction has ended.
    writer: Option<WriterPermit>,
}

impl Transaction {
    /// Takes a connection only when it has the writer lock, so that tasks which wait for the lock keep no connection from
    /// those that read. If no connection is idle it waits for one without the lock: a service that uses up its pool must not
    /// keep the outbox from writing.
    pub(super) async fn begin(pool: &SqlitePool, lock: &WriterLock) -> Result<Self, sqlx::Error> {
        let timeout = pool.options().get_acquire_timeout();
        let mut writer = lock.acquire(timeout).await.ok_or(sqlx::Error::PoolTimedOut)?;
        let mut connection = match pool.try_acquire() {
            Some(connection) => connection,
            None => {
                drop(writer);
                let connection = pool.acquire().await?;
                writer = lock.acquire(timeout).await.ok_or(sqlx::Error::PoolTimedOut)?;
                connection
            }
        };
        // A commit that failed because the disk was full has ended its transaction, of which sqlx knows nothing: no other
        // can begin on that connection.
        while connection.is_in_transaction() {
            connection.close().await?;
            connection = pool.acquire().await?;
        }
        let inner = sqlx::Transaction::begin(connection, Some(BEGIN.into_sql_str())).await?;
        Ok(Self { inner: Some(inner), writer: Some(writer) })
    }

    pub(super) async fn commit(mut self) -> Result<(), sqlx::Error> {
        // ClaimedRows apart only here: dropped half way, both are dropped in this order.
        let (inner, _writer) = (self.inner.take(), self.writer.take());
        match inner {
            Some(inner) => inner.commit().await,
            None => Ok(()),
        }
    }

    pub(super) async fn rollback(mut self) -> Result<(), sqlx::Error> {
        let (inner, _writer) = (self.inner.take(), self.writer.take());
        match inner {
            Some(inner) => inner.rollback().await,
            None => Ok(()),
        }
    }
}

impl Deref for Transaction {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        match &self.inner {
            Some(inner) => inner,
            None => unreachable!("only commit and rollback take it, and they take all"),
        }
    }
}

impl DerefMut for Transaction {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        match &mut self.inner {
            Some(inner) => inner,
            None => unreachable!("only commit and rollback take it, and they take all"),
        }
    }
}

impl Drop for Transaction {
    /// Whoever comes next finds it rolled back.
    fn drop(&mut self) {
        if let (Some(inner), writer, Ok(runtime)) = (self.inner.take(), self.writer.take(), Handle::try_current()) {
            runtime.spawn(async move {
                // Who cannot roll back has nothing to roll back any more.
                let _ = inner.rollback().await;
                drop(writer);
            });
        }
    }
}
