use std::time::Duration;

use posthaste_backend_tests::servers;
use posthaste_core::Event;
use posthaste_core::outbox::roles::*;
use posthaste_core::outbox::{Mode, OpenError, Pool, Reader, Table};
use posthaste_sql::TableName;
use posthaste_sql::postgres::OutboxStore;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

/// Long enough that no lease ends by chance.
pub const LEASE: Duration = Duration::from_secs(120);

pub const MODES: [Mode; 3] = [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED];

/// One process's view of an outbox table: it knows of other processes only through the database.
pub async fn open(pool: PgPool, table: TableName, reader: Reader, mode: Mode) -> Result<Table<OutboxStore>, OpenError> {
    Table::open(pool.open(table, mode).await?, reader, LEASE).await
}

/// A database that is empty at first.
pub struct Postgres {
    pub url: String,
    /// The pool of the service that owns this database.
    pub pool: PgPool,
}

impl Postgres {
    pub async fn start() -> Self {
        let url = servers::postgres().await;
        let pool = PgPoolOptions::new().max_connections(3).connect(&url).await.unwrap();
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
        T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin,
    {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }
}

pub fn event(id: &str, event_type: &str, payload: &str) -> Event {
    Event::builder(event_type).id(id.to_owned()).text(payload.to_owned()).build().unwrap()
}
