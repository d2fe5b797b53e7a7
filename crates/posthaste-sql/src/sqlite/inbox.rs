use std::time::Duration;

use posthaste_core::StoreError;
use posthaste_core::outbox::{OpenError, TableName};
use sqlx::sqlite::SqlitePool;
use sqlx::{AssertSqlSafe, SqliteConnection};

use super::clock::{NOW_MS, millis};
use super::database::Database;
use super::errors::store_error;
use super::migrations;
use super::outbox::{OutboxStore, beside};
use crate::inbox::inbox_methods;

/// The events that a listener has processed. It makes the listener idempotent: the listener's changes and the record
/// that the event was processed commit in one transaction.
///
/// ```no_run
/// # use posthaste_sql::sqlite::Inbox;
/// # use posthaste_core::Event;
/// # async fn listener(pool: sqlx::SqlitePool, inbox: Inbox, event: &Event) -> Result<(), Box<dyn std::error::Error>> {
/// let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await?;
/// if inbox.first_time(&mut transaction, "billing", event.id()).await? {
///     sqlx::query("UPDATE balance SET amount = amount + 1").execute(&mut *transaction).await?;
/// }
/// transaction.commit().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Inbox {
    database: Database,
    table: TableName,
}

const RECORD: &str = "INSERT INTO {table} (listener, event_id) VALUES (?, ?) ON CONFLICT DO NOTHING";

const PURGE: &str = "DELETE FROM {table} WHERE (listener, event_id) IN (
         SELECT listener, event_id FROM {table} WHERE received_at < {now_ms} - ?1 ORDER BY received_at LIMIT ?2)";

impl Inbox {
    /// Brings the table up to date. `inbox_event` is a good name.
    pub async fn open(pool: SqlitePool, table: TableName) -> Result<Self, OpenError> {
        let database = beside(&pool).await?;
        database.migrate(&table, migrations::DIALECT.inbox(&table)).await?;
        Ok(Self { database, table })
    }

    inbox_methods!(OutboxStore);

    async fn record(
        &self,
        connection: &mut SqliteConnection,
        listener: &str,
        event_id: &str,
    ) -> Result<bool, StoreError> {
        let record = sqlx::query(self.sql(RECORD)).bind(listener).bind(event_id).execute(connection).await;
        let recorded = record.map_err(|error| store_error("record an event in the inbox", error))?;
        Ok(recorded.rows_affected() == 1)
    }

    async fn delete_old(&self, older_than: Duration, limit: u32) -> Result<u64, StoreError> {
        let (inbox, age) = (self.clone(), millis(older_than));
        let write = self.database.write("purge the inbox", move |connection| {
            let purge = sqlx::query(inbox.sql(PURGE)).bind(age).bind(limit);
            Box::pin(async move { Ok(purge.execute(connection).await?.rows_affected()) })
        });
        write.await
    }

    fn sql(&self, template: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(migrations::fill(template, &self.table).replace("{now_ms}", NOW_MS))
    }
}
