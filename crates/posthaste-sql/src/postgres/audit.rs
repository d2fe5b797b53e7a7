mod list;
#[cfg(test)]
mod plans;
mod retention;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{AuditEntry, AuditFilter, AuditPage, AuditPageRequest, AuditStore};

use super::database::Database;
use super::log::{WRITE, in_transaction};

/// The audit log of the hub, in the table `audit_log`.
#[derive(Clone)]
pub struct AuditTable {
    database: Database,
}

impl AuditTable {
    /// The audit log of a database whose hub tables are up to date.
    pub fn new(database: Database) -> Self {
        Self { database }
    }
}

/// Inserts entries. Those that are there already, or that another process inserts at this moment, are left as they are.
const INSERT: &str = "INSERT INTO audit_log (id, at, log_type, event_id, event_type, subscription_id, subscriber_id, domain,
         topic, attempt, status_code, error_code, message, duration_ms)
     SELECT id::uuid, at, log_type, event_id, event_type, subscription_id, subscriber_id, domain, topic, attempt,
         status_code, error_code, message, duration_ms
     FROM unnest($1::text[], $2::timestamptz[], $3::smallint[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
         $9::text[], $10::integer[], $11::integer[], $12::text[], $13::text[], $14::bigint[])
         AS new (id, at, log_type, event_id, event_type, subscription_id, subscriber_id, domain, topic, attempt,
             status_code, error_code, message, duration_ms)
     ORDER BY id
     ON CONFLICT DO NOTHING";

#[async_trait]
impl AuditStore for AuditTable {
    async fn append(&self, entries: Arc<Vec<AuditEntry>>) -> Result<(), StoreError> {
        // By id, in the statement: two processes that insert the same entries must not wait for each other in turn.
        fn column<T>(entries: &[AuditEntry], of: impl Fn(&AuditEntry) -> T) -> Vec<T> {
            entries.iter().map(of).collect()
        }
        let text = |of: fn(&AuditEntry) -> Option<&str>| -> Vec<Option<&str>> { entries.iter().map(of).collect() };
        let insert = sqlx::query(INSERT)
            .bind(column(&entries, |entry| entry.id.clone()))
            .bind(column(&entries, |entry| entry.at))
            .bind(column(&entries, |entry| entry.log_type.code()))
            .bind(text(|entry| entry.event_id.as_deref()))
            .bind(text(|entry| entry.event_type.as_deref()))
            .bind(text(|entry| entry.subscription_id.as_deref()))
            .bind(text(|entry| entry.subscriber_id.as_deref()))
            .bind(text(|entry| entry.domain.as_deref()))
            .bind(text(|entry| entry.topic.as_deref()))
            .bind(column(&entries, |entry| entry.attempt.map(|attempt| i32::try_from(attempt).unwrap_or(i32::MAX))))
            .bind(column(&entries, |entry| entry.status_code.map(i32::from)))
            .bind(text(|entry| entry.error_code.as_deref()))
            .bind(text(|entry| entry.message.as_deref()))
            .bind(column(&entries, |entry| {
                entry.duration.map(|duration| i64::try_from(duration.as_millis()).unwrap_or(i64::MAX))
            }));
        in_transaction(self.database.audit(), "append to the audit log", WRITE, insert).await.map(|_| ())
    }

    async fn list(&self, filter: &AuditFilter, page: &AuditPageRequest) -> Result<AuditPage, StoreError> {
        list::list(&self.database, filter, page).await
    }

    async fn trail(&self, event_id: &str, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
        list::trail(&self.database, event_id, limit).await
    }

    async fn remove_expired(&self, age: Duration, limit: usize) -> Result<u64, StoreError> {
        retention::remove_expired(&self.database, age, limit).await
    }
}
