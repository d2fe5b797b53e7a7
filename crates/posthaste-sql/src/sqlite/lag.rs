//! How long the oldest item of each relay has been waiting: one step into an index for each, and no scan of a table.

use std::time::Duration;

use posthaste_core::StoreError;
use sqlx::AssertSqlSafe;

use super::clock::{NOW_MS, span};
use super::database::Database;
use super::errors::store_error;
use super::log::Log;

/// The event types with pending rows by way of the index, and the due time of the first row of each.
fn channels() -> String {
    const PENDING: &str = "outbox_event INDEXED BY outbox_event_pending_of_type WHERE status IN (0, 2)";
    format!(
        "WITH RECURSIVE kind (event_type) AS (
             SELECT min(event_type) FROM {PENDING}
             UNION ALL
             SELECT (SELECT min(event_type) FROM {PENDING} AND event_type > kind.event_type)
             FROM kind WHERE kind.event_type IS NOT NULL
         )
         SELECT event_type, {NOW_MS} - (SELECT due FROM {PENDING} AND event_type = kind.event_type ORDER BY due LIMIT 1) AS lag
         FROM kind WHERE event_type IS NOT NULL AND typeof(event_type) = 'text' AND lag > 0"
    )
}

/// Of each group, the record at the lowest watermark of all partitions that have more.
fn groups() -> String {
    format!(
        "SELECT group_name, max({NOW_MS} - record.created_at)
         FROM log_group
         CROSS JOIN log_partition ON log_partition.id = log_group.partition_id AND next_offset > watermark
         CROSS JOIN log_record AS record INDEXED BY log_record_place
             ON record.partition_id = log_group.partition_id AND record.\"offset\" = watermark
         GROUP BY group_name"
    )
}

impl Database {
    /// Event types with rows of the hub's outbox that are due, and for how long the first row has been due.
    pub async fn lag_of_channels(&self) -> Result<Vec<(String, Duration)>, StoreError> {
        self.lags(channels()).await
    }

    async fn lags(&self, sql: String) -> Result<Vec<(String, Duration)>, StoreError> {
        let rows = sqlx::query_as(AssertSqlSafe(sql)).fetch_all(self.operators()).await;
        let rows: Vec<(String, i64)> = rows.map_err(|error| store_error("measure the lag", error))?;
        Ok(rows.into_iter().map(|(name, lag)| (name, span(lag))).collect())
    }
}

impl Log {
    /// Groups with records that are not done, and how old the oldest of those is.
    pub async fn lag_of_groups(&self) -> Result<Vec<(String, Duration)>, StoreError> {
        self.database().lags(groups()).await
    }
}

#[cfg(test)]
mod tests {
    use posthaste_core::outbox::{Mode, TableName};

    use super::*;

    #[tokio::test]
    async fn no_table_of_events_is_scanned() {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", folder.path().join("lag.db").display());
        let database = Database::open(&url).await.unwrap();
        database.migrate_hub().await.unwrap();
        database.outbox(TableName::default(), Mode::SingleNode).await.unwrap();
        for sql in [channels(), groups()] {
            let explain = AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}"));
            let rows: Vec<(i64, i64, i64, String)> =
                sqlx::query_as(explain).fetch_all(database.readers()).await.unwrap();
            for (.., step) in rows {
                let scans = step.starts_with("SCAN outbox_event") || step.starts_with("SCAN record");
                assert!(!scans, "{step}");
            }
        }
    }
}
