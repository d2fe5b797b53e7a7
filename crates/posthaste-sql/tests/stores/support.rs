use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use posthaste_core::outbox::{DeadHead, Mode, OpenError, OutboxItem, OutboxRow, Reader, Store, Table, Upkeep};
use posthaste_core::{Claim, Claimed, Disposition, Event, Settled, Settlement, Source, StoreError};
use posthaste_sql::TableName;
use posthaste_sql::letters::NewLetter;
use posthaste_sql::sqlite::{Database, Ingested, OutboxStore};
use sqlx::SqliteConnection;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
use tempfile::TempDir;

pub type OutboxSource = posthaste_core::outbox::OutboxSource<OutboxStore>;

/// Long enough that no lease ends by chance.
pub const LEASE: Duration = Duration::from_secs(120);

pub const MODES: [Mode; 3] = [Mode::SingleNode, Mode::MultiNode, Mode::Ordered(DeadHead::Block)];

/// The modes in which channels read.
pub const CHANNEL_MODES: [Mode; 2] = [Mode::SingleNode, Mode::MultiNode];

/// One process's part in an outbox table.
pub struct Outbox(Table<OutboxStore>);

impl std::ops::Deref for Outbox {
    type Target = Table<OutboxStore>;

    fn deref(&self) -> &Table<OutboxStore> {
        &self.0
    }
}

impl Outbox {
    pub async fn open(
        database: Database,
        table: TableName,
        reader: Reader,
        mode: Mode,
        lease: Duration,
    ) -> Result<Self, OpenError> {
        Ok(Self(Table::open(database.outbox(table, mode).await?, reader, lease).await?))
    }

    /// As the hub does it.
    pub async fn ingest(&self, events: Vec<Arc<Event>>) -> Result<Vec<Ingested>, StoreError> {
        let ingested = self.store().ingest(events.clone()).await?;
        let types: BTreeSet<&str> = events.iter().map(|event| event.event_type()).collect();
        types.into_iter().for_each(|event_type| self.wake(event_type));
        Ok(ingested)
    }

    pub async fn write(&self, connection: &mut SqliteConnection, event: &Event) -> Result<(), StoreError> {
        self.write_all(connection, std::slice::from_ref(event)).await.map(|_| ())
    }

    /// Answers with the numbers of the rows.
    pub async fn write_all(&self, connection: &mut SqliteConnection, events: &[Event]) -> Result<Vec<i64>, StoreError> {
        let all: Vec<&Event> = events.iter().collect();
        let rows = self.store().insert(connection, &all, None).await?;
        self.wrote(events);
        Ok(rows)
    }

    pub async fn find(&self, event_id: &str) -> Result<Option<OutboxRow>, StoreError> {
        self.store().find(event_id).await
    }
}

/// Whether a claim found nothing, and nothing that will be due.
pub fn is_idle(claim: &Claim<OutboxItem>) -> bool {
    claim.items.is_empty() && claim.next_due.is_none_or(|wait| wait > LEASE / 4)
}

/// A database file that goes when the test ends.
pub struct File(TempDir);

impl File {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> PathBuf {
        self.0.path().join("test.db")
    }

    /// The file as another process would see it: connections of its own.
    pub async fn open(&self) -> Database {
        Database::open(&format!("sqlite://{}", self.path().display())).await.unwrap()
    }

    /// The pool of a service that has this file for its own.
    pub async fn pool(&self) -> SqlitePool {
        let options = SqliteConnectOptions::new().filename(self.path()).create_if_missing(true);
        SqlitePool::connect_with(options).await.unwrap()
    }

    /// It knows nothing of its siblings but what the database says.
    pub async fn outbox(&self, reader: Reader, mode: Mode, lease: Duration) -> Outbox {
        Outbox::open(self.open().await, TableName::default(), reader, mode, lease).await.unwrap()
    }

    pub async fn dispatcher(&self, mode: Mode) -> Outbox {
        self.outbox(Reader::Dispatcher, mode, LEASE).await
    }

    pub async fn channels(&self, mode: Mode) -> Outbox {
        self.outbox(Reader::Channels, mode, LEASE).await
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

pub fn letter(delivery_id: &str) -> NewLetter {
    NewLetter {
        delivery_id: delivery_id.to_owned(),
        event_id: format!("event-{delivery_id}"),
        subscription_id: "subscription".to_owned(),
        subscriber_id: "billing".to_owned(),
        event_type: "order.placed".to_owned(),
        domain: "organization".to_owned(),
        endpoint: "https://billing.example/hook".to_owned(),
        envelope: Bytes::from_static(b"\x00envelope"),
        readable: format!("{{\"delivery\":\"{delivery_id}\"}}"),
        attempts: 4,
        error: "HTTP 503 from the endpoint".to_owned(),
        error_code: "503".to_owned(),
        error_cause: None,
        first_failed_at: chrono::DateTime::from_timestamp_millis(1_750_000_000_000).unwrap(),
        first_delay: Duration::ZERO,
    }
}
