use std::time::Duration;

use posthaste_backend_tests::servers;
use posthaste_core::outbox::roles::*;
use posthaste_core::outbox::{Mode, OpenError, OutboxItem, Pool, Reader, Table};
use posthaste_core::{Claimed, Disposition, Event, Settled, Settlement, Source};
use posthaste_sql::TableName;
use posthaste_sql::mysql::OutboxStore;
use sqlx::MySqlPool;
use sqlx::mysql::MySqlPoolOptions;

/// Long enough that no lease ends by chance.
pub const LEASE: Duration = Duration::from_secs(120);

pub const MODES: [Mode; 3] = [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED];

/// One process's view of an outbox table: it knows of other processes only through the database.
pub async fn open(
    pool: MySqlPool,
    table: TableName,
    reader: Reader,
    mode: Mode,
) -> Result<Table<OutboxStore>, OpenError> {
    Table::open(pool.open(table, mode).await?, reader, LEASE).await
}

/// A database that is empty at first.
pub struct MySql {
    pub url: String,
    /// The pool of the service that owns this database.
    pub pool: MySqlPool,
}

impl MySql {
    pub async fn start() -> Self {
        let url = servers::mariadb().await;
        let pool = MySqlPoolOptions::new().max_connections(4).connect(&url).await.unwrap();
        Self { url, pool }
    }

    pub async fn dispatcher(&self, mode: Mode) -> Table<OutboxStore> {
        open(self.pool.clone(), TableName::default(), Reader::Dispatcher, mode).await.unwrap()
    }

    /// Writes events in a transaction of the service.
    pub async fn write(&self, outbox: &Table<OutboxStore>, events: &[&Event]) {
        let mut transaction = self.pool.begin().await.unwrap();
        outbox.store().insert(&mut transaction, events, None).await.unwrap();
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
