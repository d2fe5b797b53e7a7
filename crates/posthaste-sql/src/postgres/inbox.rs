use std::time::Duration;

use posthaste_core::StoreError;
use posthaste_core::outbox::{InTransaction, OpenError, TableName};
use sqlx::{AssertSqlSafe, PgPool};

use super::clock::micros;
use super::errors::store_error;
use super::migrations;
use super::outbox::{OutboxStore, migrate};

/// A receiver's memory of what it has had: makes a listener idempotent by keeping its effect and the record of it in one
/// transaction.
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
        migrate(&pool, &table, &migrations::inbox(&table)).await?;
        Ok(Self { pool, table })
    }

    /// Records that this listener has had this event, in the transaction of what it does about it; whether it had not had
    /// it before. While another transaction is about to record the same, it waits for how that ends.
    pub async fn first_time(
        &self,
        transaction: &mut impl InTransaction<OutboxStore>,
        listener: &str,
        event_id: &str,
    ) -> Result<bool, StoreError> {
        let (connection, _) = transaction.parts();
        let record = sqlx::query(self.sql(RECORD)).bind(listener).bind(event_id).execute(connection).await;
        let recorded = record.map_err(|error| store_error("record an event in the inbox", error))?;
        Ok(recorded.rows_affected() == 1)
    }

    /// Forgets at most `limit` events that are older than any duplicate that may still come; answers with how many.
    pub async fn purge(&self, older_than: Duration, limit: u32) -> Result<u64, StoreError> {
        let purge = sqlx::query(self.sql(PURGE)).bind(micros(older_than)).bind(i64::from(limit));
        let purged = purge.execute(&self.pool).await.map_err(|error| store_error("purge the inbox", error))?;
        Ok(purged.rows_affected())
    }

    fn sql(&self, template: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(migrations::fill(template, &self.table).replace("{now}", super::clock::NOW))
    }
}
