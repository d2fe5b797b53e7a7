use std::time::Duration;

use posthaste_core::StoreError;
use posthaste_core::outbox::{OpenError, TableName};
use sqlx::{AssertSqlSafe, PgConnection, PgPool};

use super::clock::micros;
use super::errors::store_error;
use super::migrations;
use super::outbox::{OutboxStore, migrate};
use crate::inbox::inbox_methods;

/// The events that a listener has processed. It makes the listener idempotent: the listener's changes and the record
/// that the event was processed commit in one transaction.
///
/// ```no_run
/// # use posthaste_sql::postgres::Inbox;
/// # use posthaste_core::Event;
/// # async fn listener(pool: sqlx::PgPool, inbox: Inbox, event: &Event) -> Result<(), Box<dyn std::error::Error>> {
/// let mut transaction = pool.begin().await?;
/// if inbox.first_time(&mut transaction, "billing", event.id()).await? {
///     sqlx::query("UPDATE balance SET amount = amount + 1").execute(&mut *transaction).await?;
/// }
/// transaction.commit().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Inbox {
    pool: PgPool,
    table: TableName,
}

const RECORD: &str = "INSERT INTO {table} (listener, event_id) VALUES ($1, $2) ON CONFLICT DO NOTHING";

const PURGE: &str = "DELETE FROM {table} WHERE (listener, event_id) IN (
         SELECT listener, event_id FROM {table} WHERE received_at < {now} - $1 * interval '1 microsecond'
         ORDER BY received_at LIMIT $2 FOR UPDATE SKIP LOCKED)";

impl Inbox {
    /// Brings the table up to date. `inbox_event` is a good name.
    pub async fn open(pool: PgPool, table: TableName) -> Result<Self, OpenError> {
        migrate(&pool, &table, &migrations::DIALECT.inbox(&table)).await?;
        Ok(Self { pool, table })
    }

    inbox_methods!(OutboxStore);

    async fn record(&self, connection: &mut PgConnection, listener: &str, event_id: &str) -> Result<bool, StoreError> {
        let record = sqlx::query(self.sql(RECORD)).bind(listener).bind(event_id).execute(connection).await;
        let recorded = record.map_err(|error| store_error("record an event in the inbox", error))?;
        Ok(recorded.rows_affected() == 1)
    }

    async fn delete_old(&self, older_than: Duration, limit: u32) -> Result<u64, StoreError> {
        let purge = sqlx::query(self.sql(PURGE)).bind(micros(older_than)).bind(i64::from(limit));
        let purged = purge.execute(&self.pool).await.map_err(|error| store_error("purge the inbox", error))?;
        Ok(purged.rows_affected())
    }

    fn sql(&self, template: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(migrations::fill(template, &self.table).replace("{now}", super::clock::NOW))
    }
}
