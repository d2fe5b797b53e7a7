use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, Utc};

use crate::StoreError;

/// What operators and readiness ask of a bus.
///
/// # Laws
///
/// Each is a test of that name in `posthaste-backend-tests` (`hub_laws`).
///
/// - `the_log_tells_where_an_event_is_and_which_groups_have_done_it`.
/// - `a_backlog_is_there_until_the_group_has_done_its_records`, and its progress changes with every record that is done.
/// - `the_lag_of_a_group_is_the_age_of_its_oldest_record`: a group that has done everything has no lag.
/// - `a_record_is_quarantined_once_per_group`.
///
/// Every question reads a bounded number of rows, however long the log is. A row that cannot be read MUST be reported and
/// left out.
#[async_trait]
pub trait BusInspector: Send + Sync + 'static {
    /// The records with this key that retention has not removed, oldest first, at most 200. An event that was copied more
    /// often shows its oldest copies.
    async fn records_of(&self, key: &str) -> Result<Vec<LogEntry>, StoreError>;

    /// Every partition of every topic, sorted by name and number.
    async fn topics(&self) -> Result<Vec<TopicState>, StoreError>;

    /// Partitions in which a group has records to do, at most 1,000.
    async fn backlogs(&self) -> Result<Vec<Backlog>, StoreError>;

    /// Groups that have records to do, and the age of the oldest of these records.
    async fn lag_of_groups(&self) -> Result<Vec<(String, Duration)>, StoreError>;

    /// How many records are in quarantine, of all groups.
    async fn quarantined_count(&self) -> Result<u64, StoreError>;
}

/// One record of the log, and the groups that read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: u32,
    /// Its place in the partition.
    pub offset: i64,
    /// Its body.
    pub value: Bytes,
    /// When it was appended.
    pub created_at: DateTime<Utc>,
    /// Every group that reads the partition.
    pub groups: Vec<GroupProgress>,
}

/// Whether a group has done one record.
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
    /// The offset that the next record gets.
    pub next_offset: i64,
    /// Each group and its watermark, the lowest offset that it has not done. `next_offset` less that is its backlog at most.
    pub groups: Vec<(String, i64)>,
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
}
