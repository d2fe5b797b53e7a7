use std::time::Duration;

use posthaste_core::StoreError;
use sqlx::AssertSqlSafe;

use super::LogTables;
use crate::log::REMOVED_AT_ONCE;
use crate::sqlite::clock::{NOW_MS, millis};
use crate::sqlite::errors::doing;

/// The partitions whose first record is expired and done by every group. A group whose progress cannot be read has done
/// nothing.
fn partitions() -> String {
    format!(
        "SELECT partition_id FROM log_group
         CROSS JOIN log_record AS record INDEXED BY log_record_place USING (partition_id)
         WHERE record.\"offset\" = (SELECT min(\"offset\") FROM log_record WHERE partition_id = log_group.partition_id)
           AND record.created_at < {NOW_MS} - ?1
         GROUP BY partition_id
         HAVING min(typeof(watermark) = 'integer') AND min(watermark) > record.\"offset\""
    )
}

/// The slowest group is looked up again, because an operator may have reset it meanwhile. The last record of the table
/// stays: consumers find out by its number that records were appended.
fn remove() -> String {
    format!(
        "DELETE FROM log_record
         WHERE rowid < (SELECT max(rowid) FROM log_record) AND rowid IN (
             SELECT rowid FROM (
                 SELECT rowid, created_at FROM log_record
                 WHERE partition_id = ?1
                   AND \"offset\" < (SELECT min(watermark) FROM log_group WHERE partition_id = ?1)
                 ORDER BY \"offset\" LIMIT ?3)
             WHERE created_at < {NOW_MS} - ?2)"
    )
}

pub(super) async fn remove_expired(tables: &LogTables, age: Duration) -> Result<u64, StoreError> {
    let age = millis(age);
    let expired = sqlx::query_scalar(AssertSqlSafe(partitions())).bind(age).fetch_all(tables.database.operators());
    let expired: Vec<i64> = doing("look for expired records", expired).await?;
    let (mut removed, database) = (0, tables.database.in_background());
    for partition in expired {
        let arguments = (partition, age);
        let remove = database.write_with("remove expired records", arguments, |connection, arguments| {
            Box::pin(async move {
                let (partition, age) = *arguments;
                let remove = sqlx::query(AssertSqlSafe(remove())).bind(partition).bind(age);
                remove.bind(i64::from(REMOVED_AT_ONCE)).execute(connection).await
            })
        });
        removed += remove.await?.rows_affected();
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqlite::plans::plan_of;

    #[tokio::test]
    async fn retention_scans_no_records() {
        for sql in [partitions(), remove()] {
            let plan = plan_of(&sql).await;
            let scans = |step: &String| step.contains("SCAN log_record") || step.contains("SCAN record");
            assert!(!plan.iter().any(scans), "{plan:?}");
        }
    }
}
