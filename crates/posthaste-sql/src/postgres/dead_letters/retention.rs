use std::time::Duration;

use posthaste_core::StoreError;
use sqlx::AssertSqlSafe;

use crate::outbox::limit;
use crate::postgres::clock::{CLOCK, micros};
use crate::postgres::database::Database;

/// Removes dead letters that were delivered long ago. Their payloads and histories go with them. Those that another
/// process is removing are left to it. Binds: the age in microseconds, the limit.
pub(super) fn remove() -> String {
    format!(
        "WITH old AS MATERIALIZED (
             SELECT id FROM dlt_event
             WHERE status = 1 AND updated_at < {CLOCK} - $1 * interval '1 microsecond'
             ORDER BY updated_at, id LIMIT $2 FOR UPDATE SKIP LOCKED
         )
         DELETE FROM dlt_event WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id"
    )
}

pub(super) async fn remove_processed(database: &Database, older_than: Duration, max: usize) -> Result<u64, StoreError> {
    let remove = sqlx::query(AssertSqlSafe(remove())).bind(micros(older_than)).bind(limit(max));
    Ok(database.write("remove processed dead letters", remove).await?.len() as u64)
}
