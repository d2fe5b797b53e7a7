use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use posthaste_core::outbox::{Mode, OutboxItem, Reader, Table};
use posthaste_core::{Claimed, Disposition, Event, Settled, Settlement, Source, StoreError};
use posthaste_sql::TableName;
use posthaste_sql::sqlite::{Database, OutboxStore};
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
use tempfile::TempDir;

/// Long enough that no lease ends during a test.
pub const LEASE: Duration = Duration::from_secs(120);

pub const MODES: [Mode; 3] = [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED];

/// A database file that is deleted when the test ends.
pub struct File(TempDir);

impl File {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> PathBuf {
        self.0.path().join("test.db")
    }

    /// Opens the file with separate connections, as another process would.
    pub async fn open(&self) -> Database {
        Database::open(&self.url()).await.unwrap()
    }

    pub fn url(&self) -> String {
        format!("sqlite://{}", self.path().display())
    }

    /// The pool of the service that owns this file.
    pub async fn pool(&self) -> SqlitePool {
        let options = SqliteConnectOptions::new().filename(self.path()).create_if_missing(true);
        SqlitePool::connect_with(options).await.unwrap()
    }

    pub async fn dispatcher(&self, mode: Mode) -> Table<OutboxStore> {
        outbox(&self.open().await, Reader::Dispatcher, mode).await
    }

    pub async fn channels(&self, mode: Mode) -> Table<OutboxStore> {
        outbox(&self.open().await, Reader::Channels, mode).await
    }

    /// Runs plain SQL as any other program would.
    pub async fn execute(&self, sql: &'static str) {
        let database = self.open().await;
        execute(&database, sql).await;
        database.close().await;
    }

    /// One value of one row.
    pub async fn ask<T>(&self, sql: &'static str) -> T
    where
        T: for<'r> sqlx::Decode<'r, sqlx::Sqlite> + sqlx::Type<sqlx::Sqlite> + Send + Unpin,
    {
        let pool = self.pool().await;
        sqlx::query_scalar(sql).fetch_one(&pool).await.unwrap()
    }
}

/// Opens an outbox table as a separate process would: it shares only the database with other processes.
pub async fn outbox(database: &Database, reader: Reader, mode: Mode) -> Table<OutboxStore> {
    let store = database.outbox(TableName::default(), mode).await.unwrap();
    Table::open(store, reader, LEASE).await.unwrap()
}

pub fn event(id: &str, event_type: &str, payload: &str) -> Arc<Event> {
    Arc::new(Event::builder(event_type).id(id.to_owned()).text(payload.to_owned()).build().unwrap())
}

pub fn ids(items: &[Claimed<OutboxItem>]) -> Vec<&str> {
    items.iter().map(|claimed| claimed.item.event.id()).collect()
}

/// Runs plain SQL as any other program would.
pub async fn execute(database: &Database, sql: &'static str) {
    try_execute(database, sql).await.unwrap();
}

pub async fn try_execute(database: &Database, sql: &'static str) -> Result<(), StoreError> {
    let write = database.write("run a test's statement", move |connection| {
        Box::pin(async move { sqlx::raw_sql(sql).execute(connection).await.map(|_| ()) })
    });
    write.await
}

pub async fn settle<S: Source>(source: &S, claimed: &Claimed<S::Item>, disposition: Disposition) -> Settled {
    let settlement = Settlement { claimed, disposition: &disposition, took: Duration::from_millis(12) };
    source.settle(&[settlement]).await.unwrap()[0]
}
