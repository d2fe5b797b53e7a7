use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::bus::Fetched;
use posthaste_core::hub_store::{Backlog, BusInspector, LogEntry, READ_BYTES, READ_RECORDS, ResetTo, TopicState};
use posthaste_core::log::StoredRecord;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, FromRow, Row};

use super::read::{Limits, read};
use super::{LogTables, READ, retention};
use crate::log::{EntryRow, SHOWN_RECORDS, TopicRow, entries, inspected, share_of_read, topics};
use crate::postgres::clock::{CLOCK, span};
use crate::postgres::errors::store_error;
use crate::unreadable::readable;

/// The column of the group in [`RECORDS_OF_KEY`]: if a row cannot be read, the progress of its group is the reason.
const GROUP_OF_ENTRY: usize = 5;

/// The records are selected before the join with the groups multiplies the rows.
pub(super) const RECORDS_OF_KEY: &str = "
    SELECT topic, partition, \"offset\", value, created_at, group_name, watermark, completed
    FROM (
        SELECT partition_id, \"offset\", value, created_at FROM log_record
        WHERE left(key, 255) = left($1, 255) AND key = $1
        ORDER BY created_at, partition_id, \"offset\" LIMIT $2
    ) AS record
    JOIN log_partition ON log_partition.id = record.partition_id
    LEFT JOIN log_group ON log_group.partition_id = record.partition_id
    ORDER BY created_at, topic, partition, \"offset\", group_name";

pub(super) const TOPICS: &str = "
    SELECT topic, partition,
        coalesce((SELECT min(\"offset\") FROM log_record WHERE partition_id = log_partition.id), next_offset),
        next_offset, group_name, watermark
    FROM log_partition LEFT JOIN log_group ON log_group.partition_id = log_partition.id
    ORDER BY topic, partition, group_name";

const PARTITIONS: &str = "SELECT partition, id FROM log_partition WHERE topic = $1 ORDER BY partition";

/// Offsets have no gaps, so a position below the end is lost if there is no record at it.
pub(super) const BACKLOGS: &str = "
    SELECT group_name, topic, partition, watermark || ' ' || completed,
        NOT EXISTS (
            SELECT 1 FROM log_record WHERE log_record.partition_id = log_group.partition_id AND \"offset\" = watermark
            LIMIT 1)
    FROM log_group JOIN log_partition ON log_partition.id = log_group.partition_id
    WHERE watermark <> next_offset
    LIMIT 1000";

/// No records are removed while a group moves to the earliest record.
const LOCK_RECORDS: &str = "SELECT pg_advisory_xact_lock_shared(hashtext('posthaste remove records'), 0)";

/// The lease ends, so that the consumer leases the partition again and reads from the new position. Binds: the group,
/// the topic, the partition (NULL: all of them), true for the earliest record.
const RESET: &str = "
    WITH read AS MATERIALIZED (
        SELECT partition_id FROM log_group
        WHERE group_name = $1
          AND partition_id IN (SELECT id FROM log_partition WHERE topic = $2 AND ($3 IS NULL OR partition = $3))
        ORDER BY partition_id
        FOR NO KEY UPDATE OF log_group
    )
    UPDATE log_group SET completed = '', generation = generation + 1, owner = NULL, leased_until = NULL, watermark = (
        SELECT CASE WHEN $4
            THEN coalesce((SELECT min(\"offset\") FROM log_record WHERE log_record.partition_id = id), next_offset)
            ELSE next_offset END
        FROM log_partition WHERE id = log_group.partition_id)
    FROM read WHERE log_group.group_name = $1 AND log_group.partition_id = read.partition_id
    RETURNING log_group.partition_id";

/// For each group, the age of the oldest record at a watermark, over all partitions with a backlog. LIMIT makes the
/// planner look up one record per partition; it would otherwise be free to join all records.
pub(super) fn lags() -> String {
    format!(
        "SELECT group_name, (max(extract(epoch FROM {CLOCK} - record.created_at)) * 1000000)::bigint
         FROM log_group
         JOIN log_partition ON log_partition.id = log_group.partition_id AND next_offset > watermark
         CROSS JOIN LATERAL (
             SELECT created_at FROM log_record
             WHERE log_record.partition_id = log_group.partition_id AND \"offset\" = watermark LIMIT 1
         ) AS record
         GROUP BY group_name"
    )
}

fn entry(row: &PgRow) -> Result<EntryRow, sqlx::Error> {
    let (group, watermark, completed): (Option<String>, Option<i64>, Option<String>) =
        (row.try_get(GROUP_OF_ENTRY)?, row.try_get(6)?, row.try_get(7)?);
    Ok(EntryRow {
        topic: row.try_get(0)?,
        partition: row.try_get::<i32, _>(1)?.unsigned_abs(),
        offset: row.try_get(2)?,
        value: row.try_get(3)?,
        created_at: row.try_get(4)?,
        group: group.zip(watermark).zip(completed).map(|((group, watermark), completed)| (group, watermark, completed)),
    })
}

fn topic(row: &PgRow) -> Result<TopicRow, sqlx::Error> {
    let (topic, partition, first_offset, next_offset, group, watermark) =
        <(String, i32, i64, i64, Option<String>, Option<i64>)>::from_row(row)?;
    Ok((topic, partition.unsigned_abs(), first_offset, next_offset, group, watermark))
}

fn backlog(row: &PgRow) -> Result<Backlog, sqlx::Error> {
    let (group, topic, partition, progress, is_position_lost) = <(String, String, i32, String, bool)>::from_row(row)?;
    Ok(Backlog { group, topic, partition: partition.unsigned_abs(), progress, is_position_lost })
}

#[async_trait]
impl BusInspector for LogTables {
    async fn records_of(&self, key: &str) -> Result<Vec<LogEntry>, StoreError> {
        if key.contains('\0') {
            // The log refuses such a key, and PostgreSQL refuses to compare with it.
            return Ok(Vec::new());
        }
        let query = sqlx::query(RECORDS_OF_KEY).bind(key).bind(i64::from(SHOWN_RECORDS));
        let rows = self.operate("find the records of an event", READ, query).await?;
        Ok(entries(readable("log_record", &rows, GROUP_OF_ENTRY, entry)))
    }

    async fn topics(&self) -> Result<Vec<TopicState>, StoreError> {
        let rows = self.operate("list topics", READ, sqlx::query(TOPICS)).await?;
        Ok(topics(readable("log_group", &rows, 0, topic)))
    }

    async fn backlogs(&self) -> Result<Vec<Backlog>, StoreError> {
        let rows = self.operate("look for backlogs", READ, sqlx::query(BACKLOGS)).await?;
        Ok(readable("log_group", &rows, 1, backlog))
    }

    async fn lag_of_groups(&self) -> Result<Vec<(String, Duration)>, StoreError> {
        let rows = self.operate("measure the lag of groups", READ, sqlx::query(AssertSqlSafe(lags()))).await?;
        let lag = |row: &PgRow| <(String, i64)>::from_row(row).map(|(group, lag)| (group, span(lag)));
        Ok(readable("log_record", &rows, 0, lag))
    }

    async fn read(&self, topic: &str, from: &BTreeMap<u32, i64>, limit: usize) -> Result<Vec<Fetched>, StoreError> {
        const DOING: &str = "find the partitions of a topic";
        if topic.contains('\0') {
            // The log refuses such a topic, and PostgreSQL refuses to compare with it.
            return Ok(Vec::new());
        }
        let rows = self.operate(DOING, READ, sqlx::query(PARTITIONS).bind(topic)).await?;
        let (mut numbers, mut places) = (HashMap::new(), Vec::new());
        for row in &rows {
            let (number, id) = <(i32, i64)>::from_row(row).map_err(|error| store_error(DOING, error))?;
            if let Some(offset) = from.get(&number.unsigned_abs()) {
                numbers.insert(id, number.unsigned_abs());
                places.push((id, *offset));
            }
        }
        let records_per_partition = share_of_read(limit, from.len());
        let limits = Limits { records: limit.min(READ_RECORDS), records_per_partition, bytes: READ_BYTES };
        let (records, _) = read(&self.operators, &places, limits).await?;
        let topic = Arc::from(topic);
        let shown = |record: StoredRecord| Some(inspected(&topic, *numbers.get(&record.partition_id)?, record));
        Ok(records.into_iter().filter_map(shown).collect())
    }

    async fn remove_expired(&self, age: Duration) -> Result<u64, StoreError> {
        retention::remove_expired(self, age).await
    }

    async fn reset(&self, group: &str, topic: &str, partition: Option<u32>, to: ResetTo) -> Result<u64, StoreError> {
        let reset = sqlx::query(RESET).bind(group).bind(topic);
        let reset = reset.bind(partition.map(|number| i32::try_from(number).unwrap_or(i32::MAX)));
        let rows = self.operate_locked("reset a group", LOCK_RECORDS, reset.bind(to == ResetTo::Earliest)).await?;
        Ok(rows.len() as u64)
    }
}
