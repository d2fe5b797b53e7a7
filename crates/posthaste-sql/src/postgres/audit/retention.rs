use std::time::Duration;

use posthaste_core::StoreError;
use sqlx::AssertSqlSafe;

use crate::outbox::limit;
use crate::postgres::clock::{NOW, micros};
use crate::postgres::database::Database;
use crate::postgres::log::{WRITE, in_transaction};

/// Removes old entries. Those that another process is removing are left to it. Binds: the age in microseconds, the limit.
pub(super) fn remove() -> String {
    format!(
        "WITH old AS MATERIALIZED (
             SELECT id FROM audit_log WHERE at < {NOW} - $1 * interval '1 microsecond'
             ORDER BY at, id LIMIT $2 FOR UPDATE SKIP LOCKED
         )
         DELETE FROM audit_log WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING log_type"
    )
}

pub(super) async fn remove_expired(database: &Database, age: Duration, max: usize) -> Result<u64, StoreError> {
    let remove = sqlx::query(AssertSqlSafe(remove())).bind(micros(age)).bind(limit(max));
    let removed = in_transaction(database.operators(), "remove expired audit entries", WRITE, remove).await?;
    Ok(removed.len() as u64)
}
