use std::ops::{Deref, DerefMut};

use sqlx::sqlite::SqlitePool;
use sqlx::{Connection, SqlSafeStr, Sqlite, SqliteConnection};
use tokio::runtime::Handle;

use crate::sqlite::writer_lock::{WriterLock, WriterPermit};

/// IMMEDIATE locks the file now, where waiting is allowed, and not at the first write.
const BEGIN: &str = "BEGIN IMMEDIATE";

/// A transaction of the service that has the writer lock. Dropping it without a commit rolls it back.
pub struct Transaction {
    /// `None` once it has ended.
    inner: Option<sqlx::Transaction<'static, Sqlite>>,
    /// Released when the transaction has ended.
    writer: Option<WriterPermit>,
}

impl Transaction {
    /// Acquires the writer lock before a connection, so that tasks that wait for the lock occupy no connection that
    /// readers need. If no connection is idle, it waits for one without the lock: a service that exhausts its pool must
    /// not keep the outbox from writing.
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
        // A commit that failed because the disk was full has ended its transaction, but sqlx does not know that. No
        // other transaction can begin on that connection, so it is closed.
        while connection.is_in_transaction() {
            connection.close().await?;
            connection = pool.acquire().await?;
        }
        let inner = sqlx::Transaction::begin(connection, Some(BEGIN.into_sql_str())).await?;
        Ok(Self { inner: Some(inner), writer: Some(writer) })
    }

    pub(super) async fn commit(mut self) -> Result<(), sqlx::Error> {
        // Separated only here. If this future is dropped half way, the transaction is dropped first and the writer lock
        // second.
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
            None => unreachable!("only commit and rollback take the transaction, and they consume it"),
        }
    }
}

impl DerefMut for Transaction {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        match &mut self.inner {
            Some(inner) => inner,
            None => unreachable!("only commit and rollback take the transaction, and they consume it"),
        }
    }
}

impl Drop for Transaction {
    /// Rolls back in the background, and releases the writer lock after that.
    fn drop(&mut self) {
        if let (Some(inner), writer, Ok(runtime)) = (self.inner.take(), self.writer.take(), Handle::try_current()) {
            runtime.spawn(async move {
                // If the rollback fails, the transaction has ended already.
                let _ = inner.rollback().await;
                drop(writer);
            });
        }
    }
}
