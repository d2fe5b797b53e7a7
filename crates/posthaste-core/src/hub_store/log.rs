use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, Utc};

use crate::StoreError;
use crate::bus::Fetched;

/// How many records [`BusInspector::read`] returns at most, and how many bytes. A single record may be larger.
pub const READ_RECORDS: usize = 500;
/// See [`READ_RECORDS`].
pub const READ_BYTES: usize = 4 * 1024 * 1024;

/// Queries and commands of operators on a bus.
///
/// # Laws
///
/// Each is a test of that name in `posthaste-backend-tests` (`hub_laws`).
///
/// - `the_log_shows_where_an_event_is_and_which_groups_have_done_it`.
/// - `a_backlog_exists_until_the_group_has_done_its_records`, and its progress changes with every record that is done.
/// - `the_lag_of_a_group_is_the_age_of_its_oldest_record`: a group that has done everything has no lag.
/// - `retention_never_passes_the_slowest_group`: an expired record is kept until every group has done it.
/// - `a_read_continues_in_every_partition`: from each offset on, in order, without joining a group.
/// - `a_read_is_bounded_in_records_and_bytes`, and returns at least one record if there is one.
///
/// Every query reads a bounded number of rows, however long the log is. A row that cannot be read MUST be reported and
/// left out.
#[async_trait]
pub trait BusInspector: Send + Sync + 'static {
    /// The records with this key that retention has not removed, oldest first, at most 200. Of more records, the oldest
    /// 200 are returned.
    async fn records_of(&self, key: &str) -> Result<Vec<LogEntry>, StoreError>;

    /// True if [`records_of`](Self::records_of) finds records. Not every bus has an index of keys.
    fn has_key_index(&self) -> bool {
        true
    }

    /// Every partition of every topic, sorted by name and number.
    async fn topics(&self) -> Result<Vec<TopicState>, StoreError>;

    /// Partitions in which a group has records to do or whose position is lost, at most 1,000.
    async fn backlogs(&self) -> Result<Vec<Backlog>, StoreError>;

    /// Groups that have records to do, and the age of the oldest of these records.
    async fn lag_of_groups(&self) -> Result<Vec<(String, Duration)>, StoreError>;

    /// Records of these partitions from these offsets on, in order per partition: at most `limit`, [`READ_RECORDS`] and
    /// [`READ_BYTES`]. Each partition gets an equal share of the limit, so that a long one does not hide the others.
    /// Partitions that do not exist are left out. It joins no group. The generation of the positions has no meaning.
    async fn read(&self, topic: &str, from: &BTreeMap<u32, i64>, limit: usize) -> Result<Vec<Fetched>, StoreError>;

    /// Removes records that are older than this and that every group of their partition has done, at most a few thousand.
    /// Returns how many; 0 if there are none left. Records of a partition that no group reads are kept.
    ///
    /// A bus that has a retention of its own removes nothing here.
    async fn remove_expired(&self, age: Duration) -> Result<u64, StoreError>;

    /// Moves a group to another position in one partition of a topic, or in all of them. Its consumers go on from there;
    /// records in flight may be delivered again. Returns the number of partitions, 0 if the group does not read the
    /// topic.
    async fn reset(&self, group: &str, topic: &str, partition: Option<u32>, to: ResetTo) -> Result<u64, StoreError>;
}

/// Where a group goes on reading a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetTo {
    /// At the earliest record that exists.
    Earliest,
    /// At the next record that is published.
    Latest,
}

/// One record of the log, and the groups that read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: u32,
    /// Its offset in the partition.
    pub offset: i64,
    /// Its body.
    pub value: Bytes,
    /// When it was appended.
    pub created_at: DateTime<Utc>,
    /// Every group that reads the partition.
    pub groups: Vec<GroupProgress>,
}

/// The progress of one group with one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupProgress {
    /// The group.
    pub group: String,
    /// True if it has done the record.
    pub done: bool,
}

/// One partition of a topic and the progress of each group in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicState {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: u32,
    /// The lowest offset that exists, or the next one if there are no records.
    pub first_offset: i64,
    /// The offset that the next record gets.
    pub next_offset: i64,
    /// Each group and its watermark, the lowest offset that it has not done. The backlog is at
    /// most `next_offset` minus the watermark.
    pub groups: Vec<(String, i64)>,
}

impl TopicState {
    /// True if this position does not exist: nothing is read from there until an operator resets it.
    pub fn is_lost(&self, position: i64) -> bool {
        !(self.first_offset..=self.next_offset).contains(&position)
    }
}

/// A partition in which a group has records to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backlog {
    /// The group.
    pub group: String,
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: u32,
    /// Changes with every record that the group has done.
    pub progress: String,
    /// True if the position of the group does not exist: nothing is read until an operator resets it.
    pub is_position_lost: bool,
}
