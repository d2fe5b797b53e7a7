use std::time::Duration;

use posthaste_core::StoreError;
use posthaste_core::hub_store::{ExpiredRecords, QuarantineStatus};
use sqlx::{AssertSqlSafe, FromRow};

use super::super::{LogTables, WRITE};
use super::operator::unclaimed;
use crate::outbox::limit;
use crate::postgres::clock::{CLOCK, micros};

/// Removes old records of one status. Those that another process is changing or removing are left to it. Binds: the
/// status, the age in microseconds, the limit.
pub(in super::super) fn remove() -> String {
    format!(
        "WITH old AS MATERIALIZED (
             SELECT id FROM quarantined_record
             WHERE status = $1 AND created_at < {CLOCK} - $2 * interval '1 microsecond' AND {}
             ORDER BY created_at, id LIMIT $3 FOR UPDATE SKIP LOCKED
         )
         DELETE FROM quarantined_record WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING group_name, topic",
        unclaimed()
    )
}

/// One transaction for each status, so that others do not wait for all of them.
pub(super) async fn remove_expired(
    tables: &LogTables,
    age: Duration,
    max: usize,
) -> Result<ExpiredRecords, StoreError> {
    let mut removed = Vec::new();
    for status in QuarantineStatus::ALL {
        let remove = sqlx::query(AssertSqlSafe(remove())).bind(status.code()).bind(micros(age)).bind(limit(max));
        for row in &tables.operate("remove expired quarantined records", WRITE, remove).await? {
            // A row that cannot be read is removed all the same.
            let (group, topic) = <(String, String)>::from_row(row).unwrap_or_default();
            removed.push((status, group, topic));
        }
    }
    Ok(ExpiredRecords::count(removed))
}
