use std::time::Duration;

use posthaste_core::outbox::{OpenError, TableName};
use posthaste_core::{FaultKind, StoreError};
use sqlx::{AssertSqlSafe, MySqlConnection, MySqlPool};

use super::clock::{NOW, micros};
use super::errors::{TooLong, doing, store_error};
use super::migrations;
use super::outbox::{OutboxStore, migrate};
use super::pooled::Pooled;
use crate::inbox::inbox_methods;

/// The events that a listener has processed. It makes the listener idempotent: the listener's changes and the record
/// that the event was processed commit in one transaction.
///
/// ```no_run
/// # use posthaste_sql::mysql::Inbox;
/// # use posthaste_core::Event;
/// # async fn listener(pool: sqlx::MySqlPool, inbox: Inbox, event: &Event) -> Result<(), Box<dyn std::error::Error>> {
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
    pool: MySqlPool,
    table: TableName,
}

/// Fails if the event is already recorded. The failure undoes this statement and no other of its transaction.
const RECORD: &str = "INSERT INTO {table} (listener, event_id) VALUES (?, ?)";

const PURGE: &str =
    "DELETE FROM {table} WHERE received_at < {now} - INTERVAL ? MICROSECOND ORDER BY received_at LIMIT ?";

/// How long the names of listeners and the ids of events may be.
const LONGEST: usize = 128;

impl Inbox {
    /// Brings the table up to date. `inbox_event` is a good name.
    pub async fn open(pool: MySqlPool, table: TableName) -> Result<Self, OpenError> {
        migrate(&pool, &table, &migrations::DIALECT.inbox(&table)).await?;
        Ok(Self { pool, table })
    }

    inbox_methods!(OutboxStore);

    async fn record(
        &self,
        connection: &mut MySqlConnection,
        listener: &str,
        event_id: &str,
    ) -> Result<bool, StoreError> {
        const DOING: &str = "record an event in the inbox";
        for (column, text) in [("listener", listener), ("event_id", event_id)] {
            let fits = TooLong::check(column, text, LONGEST);
            fits.map_err(|error| StoreError::new(DOING, FaultKind::Permanent, error))?;
        }
        match sqlx::query(self.sql(RECORD)).bind(listener).bind(event_id).execute(connection).await {
            Ok(_) => Ok(true),
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => Ok(false),
            Err(error) => Err(store_error(DOING, error)),
        }
    }

    async fn delete_old(&self, older_than: Duration, limit: u32) -> Result<u64, StoreError> {
        let purge = async {
            let mut connection = Pooled::acquire(&self.pool).await?;
            let purge = sqlx::query(self.sql(PURGE)).bind(micros(older_than)).bind(i64::from(limit));
            let purged = purge.execute(&mut *connection).await?;
            connection.finish();
            Ok(purged.rows_affected())
        };
        doing("purge the inbox", purge).await
    }

    fn sql(&self, template: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(migrations::fill(template, &self.table).replace("{now}", NOW))
    }
}
