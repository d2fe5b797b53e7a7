use std::time::Duration;

use posthaste_core::StoreError;
use sqlx::AssertSqlSafe;

use super::LogTables;
use crate::log::REMOVED_AT_ONCE;
use crate::postgres::clock::{CLOCK, micros};

/// Waits for groups that are moving to the earliest record. They wait for the end of the transaction.
const LOCK: &str = "SELECT pg_advisory_xact_lock(hashtext('posthaste remove records'), 0)";

/// Removes the first records of partitions that are expired and done by every group. Only partitions whose first record
/// is both are looked at further. Records that another process is removing are left to it. Binds: the age in
/// microseconds, the largest number of records.
pub(super) fn remove() -> String {
    let expired = format!("created_at < {CLOCK} - $1 * interval '1 microsecond'");
    format!(
        "WITH done AS MATERIALIZED (
             SELECT partition_id, min(watermark) AS watermark FROM log_group GROUP BY partition_id
         ), expired AS MATERIALIZED (
             SELECT old.partition_id, old.\"offset\"
             FROM done
             CROSS JOIN LATERAL (
                 SELECT \"offset\", created_at FROM log_record
                 WHERE log_record.partition_id = done.partition_id ORDER BY \"offset\" LIMIT 1
             ) AS first
             CROSS JOIN LATERAL (
                 SELECT partition_id, \"offset\", created_at FROM log_record
                 WHERE log_record.partition_id = done.partition_id AND log_record.\"offset\" < done.watermark
                 ORDER BY \"offset\" LIMIT $2 FOR UPDATE SKIP LOCKED
             ) AS old
             WHERE first.\"offset\" < done.watermark AND first.{expired} AND old.{expired}
             LIMIT $2
         )
         DELETE FROM log_record USING expired
         WHERE log_record.partition_id = expired.partition_id AND log_record.\"offset\" = expired.\"offset\"
         RETURNING log_record.partition_id"
    )
}

pub(super) async fn remove_expired(tables: &LogTables, age: Duration) -> Result<u64, StoreError> {
    let remove = sqlx::query(AssertSqlSafe(remove())).bind(micros(age)).bind(i64::from(REMOVED_AT_ONCE));
    let rows = tables.operate_locked("remove expired records", LOCK, remove).await?;
    Ok(rows.len() as u64)
}
