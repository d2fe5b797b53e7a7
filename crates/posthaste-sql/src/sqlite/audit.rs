mod list;
mod retention;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{AuditEntry, AuditFilter, AuditPage, AuditPageRequest, AuditStore, LogType};
use sqlx::{AssertSqlSafe, SqliteConnection};
use uuid::Uuid;

use super::database::Database;
use super::errors::doing;

/// The number of rows that one statement inserts.
const CHUNK: usize = 64;

/// The audit log of the hub, in the table `audit_log`.
#[derive(Clone)]
pub struct AuditTable {
    database: Database,
    /// No other write waits for the audit log.
    background: Database,
}

impl AuditTable {
    /// The audit log of a database whose hub tables are up to date.
    pub fn new(database: Database) -> Self {
        Self { background: database.in_background(), database }
    }
}

#[async_trait]
impl AuditStore for AuditTable {
    async fn append(&self, entries: Arc<Vec<AuditEntry>>) -> Result<(), StoreError> {
        let append = self.background.write_with("append to the audit log", entries, |connection, entries| {
            Box::pin(async move { insert(connection, &entries).await })
        });
        append.await
    }

    async fn list(&self, filter: &AuditFilter, page: &AuditPageRequest) -> Result<AuditPage, StoreError> {
        doing("list the audit log", list::list(self.database.operators(), filter, page)).await
    }

    async fn trail(&self, event_id: &str, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
        doing("read the audit trail of an event", list::trail(self.database.operators(), event_id, limit)).await
    }

    async fn remove_expired(&self, age: Duration, limit: usize) -> Result<u64, StoreError> {
        retention::remove_expired(&self.background, age, limit).await
    }
}

/// Inserts so many rows. Entries that are there already are left as they are. A RECEIVED entry may be there at another
/// time.
fn insert_rows(rows: usize) -> String {
    let values = vec!["(?,?,?,?,?,?,?,?,?,?,?,?,?,?)"; rows].join(",");
    format!(
        "INSERT INTO audit_log (at, id, log_type, event_id, event_type, subscription_id, subscriber_id, domain, topic,
             attempt, status_code, error_code, message, duration_ms)
         SELECT * FROM (VALUES {values}) AS new
         WHERE new.column3 <> {} OR NOT EXISTS (
             SELECT 1 FROM audit_log INDEXED BY audit_log_event WHERE event_id = new.column4 AND id = new.column2)
         ON CONFLICT DO NOTHING",
        LogType::Received.code()
    )
}

async fn insert(connection: &mut SqliteConnection, entries: &[AuditEntry]) -> Result<(), sqlx::Error> {
    for chunk in entries.chunks(CHUNK) {
        let mut insert = sqlx::query(AssertSqlSafe(insert_rows(chunk.len())));
        for entry in chunk {
            let duration = entry.duration.map(|duration| i64::try_from(duration.as_millis()).unwrap_or(i64::MAX));
            insert = insert
                .bind(entry.at.timestamp_micros())
                .bind(id_bytes(&entry.id))
                .bind(entry.log_type.code())
                .bind(&entry.event_id)
                .bind(&entry.event_type)
                .bind(&entry.subscription_id)
                .bind(&entry.subscriber_id)
                .bind(&entry.domain)
                .bind(&entry.topic)
                .bind(entry.attempt)
                .bind(entry.status_code)
                .bind(&entry.error_code)
                .bind(&entry.message)
                .bind(duration);
        }
        insert.execute(&mut *connection).await?;
    }
    Ok(())
}

/// The id as it is stored. Ids are UUIDs, because the hub makes them.
fn id_bytes(id: &str) -> Vec<u8> {
    Uuid::parse_str(id).unwrap_or_default().as_bytes().to_vec()
}
