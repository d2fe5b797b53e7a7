//! What operators ask of the log.

use bytes::Bytes;
use chrono::{DateTime, Utc};
use posthaste_core::{Progress, StoreError};
use sqlx::FromRow;
use sqlx::sqlite::SqliteRow;

use super::super::errors::store_error;
use super::super::unreadable::readable;
use super::Log;

/// One record of the log, and who has read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Of which topic.
    pub topic: String,
    /// In which partition.
    pub partition: u32,
    /// Its place there.
    pub offset: i64,
    /// Its body.
    pub value: Bytes,
    /// When it was appended.
    pub created_at: DateTime<Utc>,
    /// Every group that reads this partition.
    pub groups: Vec<GroupProgress>,
}

/// Whether a group is done with one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupProgress {
    /// Which one.
    pub group: String,
    /// Whether it is through with the record.
    pub done: bool,
}

/// One partition of a topic and how far each of its groups has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicState {
    /// Of which topic.
    pub topic: String,
    /// Of which partition.
    pub partition: u32,
    /// The offset that the next record gets.
    pub next_offset: i64,
    /// Each group and the lowest offset that it has not done; `next_offset` less that is its backlog at most.
    pub groups: Vec<(String, i64)>,
}

/// A partition in which a group has records to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backlog {
    /// Which group.
    pub group: String,
    /// Of which topic.
    pub topic: String,
    /// Of which partition.
    pub partition: u32,
    /// Changes with every record that the group has done.
    pub progress: String,
}

/// Topic, partition, offset, value and time of a record, with one group that reads it and how far that has come.
type EntryRow = (String, u32, i64, Vec<u8>, i64, Option<String>, Option<i64>, Option<String>);

/// Topic, partition and next offset, with one group that reads it and its watermark.
type TopicRow = (String, u32, i64, Option<String>, Option<i64>);

/// Where [`RECORDS_OF_KEY`] has the group, whose progress is what may be unreadable.
const GROUP_OF_ENTRY: usize = 5;

/// How many records of one event are shown: each comes with its value, which may be a mebibyte.
const SHOWN_RECORDS: u32 = 200;

/// The records are chosen before their values are read and before the groups multiply the rows.
const RECORDS_OF_KEY: &str = "
    SELECT topic, partition, \"offset\", value, created_at, group_name, watermark, completed
    FROM log_record
    JOIN log_partition ON log_partition.id = log_record.partition_id
    LEFT JOIN log_group ON log_group.partition_id = log_record.partition_id
    WHERE log_record.rowid IN (SELECT rowid FROM log_record WHERE key = ?1 ORDER BY created_at, rowid LIMIT ?2)
    ORDER BY created_at, topic, partition, \"offset\", group_name";

const TOPICS: &str = "
    SELECT topic, partition, next_offset, group_name, watermark
    FROM log_partition LEFT JOIN log_group ON log_group.partition_id = log_partition.id
    ORDER BY topic, partition, group_name";

/// Compared as text, so that a progress row that cannot be read is shown as what it is: one that does not move.
const BACKLOGS: &str = "
    SELECT group_name, topic, partition, watermark || ' ' || completed
    FROM log_group JOIN log_partition ON log_partition.id = log_group.partition_id
    WHERE watermark < next_offset OR typeof(watermark) <> 'integer'
    LIMIT 1000";

impl Log {
    /// The partitions in which a group has records to do, as far as a thousand of them.
    pub async fn backlogs(&self) -> Result<Vec<Backlog>, StoreError> {
        let rows = sqlx::query(BACKLOGS)
            .fetch_all(self.0.database.operators())
            .await
            .map_err(|error| store_error("look for records that wait", error))?;
        let backlog = |row: &SqliteRow| {
            let (group, topic, partition, progress) = <(String, String, u32, String)>::from_row(row)?;
            Ok(Backlog { group, topic, partition, progress })
        };
        Ok(readable("log_group", &rows, 1, backlog))
    }

    /// The records of this key that retention has not removed, oldest first. Only the oldest 200 are shown: an event
    /// that was copied more often shows how it began, and not its newest copies.
    pub async fn records_of(&self, key: &str) -> Result<Vec<LogEntry>, StoreError> {
        const DOING: &str = "find the records of an event";
        let rows = sqlx::query(RECORDS_OF_KEY)
            .bind(key)
            .bind(SHOWN_RECORDS)
            .fetch_all(self.0.database.operators())
            .await
            .map_err(|error| store_error(DOING, error))?;
        let mut entries: Vec<LogEntry> = Vec::new();
        let rows = readable("log_record", &rows, GROUP_OF_ENTRY, |row| EntryRow::from_row(row));
        for (topic, partition, offset, value, created_at, group, watermark, completed) in rows {
            let is_this = |last: &LogEntry| (&last.topic, last.partition, last.offset) == (&topic, partition, offset);
            if !entries.last().is_some_and(is_this) {
                let created_at = DateTime::from_timestamp_millis(created_at).unwrap_or_default();
                let value = Bytes::from(value);
                entries.push(LogEntry { topic, partition, offset, value, created_at, groups: Vec::new() });
            }
            if let (Some(group), Some(watermark), Some(completed)) = (group, watermark, completed)
                && let Some(entry) = entries.last_mut()
            {
                // A completed set that cannot be read counts for nothing, as it does for its reader.
                let progress = Progress::decode(watermark, &completed).unwrap_or(Progress::at(watermark));
                entry.groups.push(GroupProgress { group, done: progress.is_done(offset) });
            }
        }
        Ok(entries)
    }

    /// Every partition of every topic, by name and number.
    pub async fn topics(&self) -> Result<Vec<TopicState>, StoreError> {
        let rows = sqlx::query(TOPICS)
            .fetch_all(self.0.database.operators())
            .await
            .map_err(|error| store_error("list topics", error))?;
        let mut topics: Vec<TopicState> = Vec::new();
        for (topic, partition, next_offset, group, watermark) in
            readable("log_group", &rows, 0, |row| TopicRow::from_row(row))
        {
            if !topics.last().is_some_and(|last| last.topic == topic && last.partition == partition) {
                topics.push(TopicState { topic, partition, next_offset, groups: Vec::new() });
            }
            if let Some(state) = topics.last_mut() {
                state.groups.extend(group.zip(watermark));
            }
        }
        Ok(topics)
    }

    /// How many records are in quarantine, of all groups.
    pub async fn quarantined_count(&self) -> Result<u64, StoreError> {
        let count: i64 = sqlx::query_scalar("SELECT records FROM quarantine_depth")
            .fetch_one(self.0.database.operators())
            .await
            .map_err(|error| store_error("count quarantined records", error))?;
        Ok(count.unsigned_abs())
    }
}
