use std::time::Duration;

use posthaste_core::outbox::{DeadHead, Mode, OpenError, OutboxItem, OutboxRow, Pool, Reader, Store, Table, Upkeep};
use posthaste_core::{Claim, Claimed, Disposition, Event, Settled, Settlement, Source, StoreError};
use posthaste_sql::TableName;
use posthaste_sql::mysql::OutboxStore;
use posthaste_testing::servers;
use sqlx::mysql::MySqlPoolOptions;
use sqlx::{MySqlConnection, MySqlPool};

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
        pool: MySqlPool,
        table: TableName,
        reader: Reader,
        mode: Mode,
        lease: Duration,
    ) -> Result<Self, OpenError> {
        Ok(Self(Table::open(pool.open(table, mode).await?, reader, lease).await?))
    }

    pub async fn write(&self, connection: &mut MySqlConnection, event: &Event) -> Result<(), StoreError> {
        self.write_all(connection, std::slice::from_ref(event)).await.map(|_| ())
    }

    /// Answers with the numbers of the rows.
    pub async fn write_all(&self, connection: &mut MySqlConnection, events: &[Event]) -> Result<Vec<i64>, StoreError> {
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

/// A database that is empty at first.
pub struct MySql {
    pub url: String,
    /// The pool of a service that has this database for its own.
    pub pool: MySqlPool,
}

impl MySql {
    pub async fn start() -> Self {
        let url = servers::mariadb().await;
        let pool = MySqlPoolOptions::new().max_connections(4).connect(&url).await.unwrap();
        Self { url, pool }
    }

    /// The outbox as another process would see it: it knows nothing of its siblings but what the database says.
    pub async fn outbox(&self, reader: Reader, mode: Mode, lease: Duration) -> Outbox {
        Outbox::open(self.pool.clone(), TableName::default(), reader, mode, lease).await.unwrap()
    }

    pub async fn dispatcher(&self, mode: Mode) -> Outbox {
        self.outbox(Reader::Dispatcher, mode, LEASE).await
    }

    pub async fn channels(&self, mode: Mode) -> Outbox {
        self.outbox(Reader::Channels, mode, LEASE).await
    }

    /// Writes events in a transaction of the service.
    pub async fn write(&self, outbox: &Outbox, events: &[Event]) {
        let mut transaction = self.pool.begin().await.unwrap();
        outbox.write_all(&mut transaction, events).await.unwrap();
        transaction.commit().await.unwrap();
    }

    /// Runs plain SQL as any other program would.
    pub async fn execute(&self, sql: &'static str) {
        sqlx::raw_sql(sql).execute(&self.pool).await.unwrap();
    }

    /// One value of one row.
    pub async fn ask<T>(&self, sql: &'static str) -> T
    where
        T: for<'r> sqlx::Decode<'r, sqlx::MySql> + sqlx::Type<sqlx::MySql> + Send + Unpin,
    {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }
}

pub fn event(id: &str, event_type: &str, payload: &str) -> Event {
    Event::builder(event_type).id(id.to_owned()).text(payload.to_owned()).build().unwrap()
}

pub fn ids(items: &[Claimed<OutboxItem>]) -> Vec<&str> {
    items.iter().map(|claimed| claimed.item.event.id()).collect()
}

pub async fn settle<S: Source>(source: &S, claimed: &Claimed<S::Item>, disposition: Disposition) -> Settled {
    let settlement = Settlement { claimed, disposition: &disposition, took: Duration::from_millis(12) };
    source.settle(&[settlement]).await.unwrap()[0]
}
