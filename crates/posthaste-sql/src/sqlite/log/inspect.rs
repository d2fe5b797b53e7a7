use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::bus::Fetched;
use posthaste_core::hub_store::{Backlog, BusInspector, LogEntry, READ_BYTES, READ_RECORDS, ResetTo, TopicState};
use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, FromRow, Row};

use super::read::read;
use super::{LogTables, retention};
use crate::log::{EntryRow, SHOWN_RECORDS, TopicRow, entries, inspected, share_of_read, topics};
use crate::sqlite::clock::{NOW_MS, span, time};
use crate::sqlite::errors::doing;
use crate::unreadable::readable;

/// The column of the group in [`RECORDS_OF_KEY`]: if a row cannot be read, the progress of its group is the reason.
const GROUP_OF_ENTRY: usize = 5;

/// The records are selected before their values are read and before the join with the groups multiplies the rows.
const RECORDS_OF_KEY: &str = "
    SELECT topic, partition, \"offset\", value, created_at, group_name, watermark, completed
    FROM log_record
    JOIN log_partition ON log_partition.id = log_record.partition_id
    LEFT JOIN log_group ON log_group.partition_id = log_record.partition_id
    WHERE log_record.rowid IN (SELECT rowid FROM log_record WHERE key = ?1 ORDER BY created_at, rowid LIMIT ?2)
    ORDER BY created_at, topic, partition, \"offset\", group_name";

const TOPICS: &str = "
    SELECT topic, partition,
        coalesce((SELECT min(\"offset\") FROM log_record WHERE partition_id = log_partition.id), next_offset),
        next_offset, group_name, watermark
    FROM log_partition LEFT JOIN log_group ON log_group.partition_id = log_partition.id
    ORDER BY topic, partition, group_name";

const PARTITIONS: &str = "SELECT partition, id FROM log_partition WHERE topic = ?1 ORDER BY partition";

/// Progress is compared as text, so that an unreadable progress row counts as a row without progress.
///
/// Offsets have no gaps, so a position below the end is lost if there is no record at it.
const BACKLOGS: &str = "
    SELECT group_name, topic, partition, watermark || ' ' || completed,
        typeof(watermark) = 'integer' AND NOT EXISTS (
            SELECT 1 FROM log_record WHERE log_record.partition_id = log_group.partition_id AND \"offset\" = watermark)
    FROM log_group JOIN log_partition ON log_partition.id = log_group.partition_id
    WHERE watermark <> next_offset OR typeof(watermark) <> 'integer'
    LIMIT 1000";

/// The lease ends, so that the consumer leases the partition again and reads from the new position.
const RESET: &str = "
    UPDATE log_group SET completed = '', generation = generation + 1, owner = NULL, leased_until = 0, watermark = (
        SELECT CASE WHEN ?4
            THEN coalesce((SELECT min(\"offset\") FROM log_record WHERE log_record.partition_id = id), next_offset)
            ELSE next_offset END
        FROM log_partition WHERE id = log_group.partition_id)
    WHERE group_name = ?1
      AND partition_id IN (SELECT id FROM log_partition WHERE topic = ?2 AND (?3 IS NULL OR partition = ?3))";

/// For each group, the age of the oldest record at a watermark, over all partitions with a backlog.
fn lags() -> String {
    format!(
        "SELECT group_name, max({NOW_MS} - record.created_at)
         FROM log_group
         CROSS JOIN log_partition ON log_partition.id = log_group.partition_id AND next_offset > watermark
         CROSS JOIN log_record AS record INDEXED BY log_record_place
             ON record.partition_id = log_group.partition_id AND record.\"offset\" = watermark
         GROUP BY group_name"
    )
}

fn entry(row: &SqliteRow) -> Result<EntryRow, sqlx::Error> {
    let (group, watermark, completed): (Option<String>, Option<i64>, Option<String>) =
        (row.try_get(GROUP_OF_ENTRY)?, row.try_get(6)?, row.try_get(7)?);
    Ok(EntryRow {
        topic: row.try_get(0)?,
        partition: row.try_get(1)?,
        offset: row.try_get(2)?,
        value: row.try_get(3)?,
        created_at: time(row.try_get(4)?),
        group: group.zip(watermark).zip(completed).map(|((group, watermark), completed)| (group, watermark, completed)),
    })
}

#[async_trait]
impl BusInspector for LogTables {
    async fn records_of(&self, key: &str) -> Result<Vec<LogEntry>, StoreError> {
        let query = sqlx::query(RECORDS_OF_KEY).bind(key).bind(SHOWN_RECORDS);
        let rows = doing("find the records of an event", query.fetch_all(self.database.operators())).await?;
        Ok(entries(readable("log_record", &rows, GROUP_OF_ENTRY, entry)))
    }

    async fn topics(&self) -> Result<Vec<TopicState>, StoreError> {
        let rows = doing("list topics", sqlx::query(TOPICS).fetch_all(self.database.operators())).await?;
        Ok(topics(readable("log_group", &rows, 0, |row| TopicRow::from_row(row))))
    }

    async fn backlogs(&self) -> Result<Vec<Backlog>, StoreError> {
        let rows = doing("look for backlogs", sqlx::query(BACKLOGS).fetch_all(self.database.operators())).await?;
        let backlog = |row: &SqliteRow| {
            let (group, topic, partition, progress, is_position_lost) =
                <(String, String, u32, String, bool)>::from_row(row)?;
            Ok(Backlog { group, topic, partition, progress, is_position_lost })
        };
        Ok(readable("log_group", &rows, 1, backlog))
    }

    async fn lag_of_groups(&self) -> Result<Vec<(String, Duration)>, StoreError> {
        let query = sqlx::query_as(AssertSqlSafe(lags())).fetch_all(self.database.operators());
        let rows: Vec<(String, i64)> = doing("measure the lag of groups", query).await?;
        Ok(rows.into_iter().map(|(group, lag)| (group, span(lag))).collect())
    }

    async fn read(&self, topic: &str, from: &BTreeMap<u32, i64>, limit: usize) -> Result<Vec<Fetched>, StoreError> {
        let query = sqlx::query_as(PARTITIONS).bind(topic).fetch_all(self.database.operators());
        let ids: Vec<(u32, i64)> = doing("find the partitions of a topic", query).await?;
        let places = ids.into_iter().filter_map(|(partition, id)| Some((partition, id, *from.get(&partition)?)));
        let (topic, limit, share) = (Arc::from(topic), limit.min(READ_RECORDS), share_of_read(limit, from.len()));
        let (mut found, mut bytes) = (Vec::new(), 0);
        for (partition, id, offset) in places {
            let share = share.min(limit - found.len());
            if share == 0 || bytes >= READ_BYTES {
                break;
            }
            let (records, _) = read(self.database.operators(), &[(id, offset)], share, READ_BYTES - bytes).await?;
            bytes += records.iter().map(|record| record.value.len()).sum::<usize>();
            found.extend(records.into_iter().map(|record| inspected(&topic, partition, record)));
        }
        Ok(found)
    }

    async fn remove_expired(&self, age: Duration) -> Result<u64, StoreError> {
        retention::remove_expired(self, age).await
    }

    async fn reset(&self, group: &str, topic: &str, partition: Option<u32>, to: ResetTo) -> Result<u64, StoreError> {
        let arguments = (group.to_owned(), topic.to_owned(), partition, to);
        let reset = self.database.write_with("reset a group", arguments, |connection, arguments| {
            Box::pin(async move {
                let (group, topic, partition, to) = &*arguments;
                let reset = sqlx::query(RESET).bind(group).bind(topic).bind(*partition);
                reset.bind(*to == ResetTo::Earliest).execute(connection).await
            })
        });
        Ok(reset.await?.rows_affected())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqlite::plans::plan_of;

    #[tokio::test]
    async fn the_lag_of_groups_scans_no_records() {
        let plan = plan_of(&lags()).await;
        assert!(plan.iter().all(|step| !step.starts_with("SCAN record")), "{plan:?}");
    }
}
