//! Quarantined records as operators see them: list, show, replay and discard.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, Utc};

use super::BadCursor;
use crate::StoreError;
use crate::bus::Quarantine;

/// The table of quarantined records.
///
/// A record is replayed in three steps: it is claimed, published to its topic, and marked as replayed. A claim ends by
/// itself, so that a process that crashes between the steps does not keep the record. `now` is the database's own
/// clock, read inside the statement.
///
/// # Laws
///
/// Each is a test of that name in `posthaste-backend-tests` (`hub_laws`).
///
/// - `a_record_is_quarantined_once_per_group`. Each gets a UUID as its id, which never changes.
/// - `another_record_at_a_known_position_is_quarantined`: a topic was deleted and created again.
/// - `a_quarantined_record_is_kept_unchanged`: key, value, headers and position.
/// - `the_quarantine_is_counted_by_group_and_topic`: only records with the status QUARANTINED count.
/// - `the_list_is_filtered_and_newest_first`, `a_page_of_the_quarantine_continues_after_its_cursor`.
/// - `a_claimed_record_is_neither_claimed_again_nor_discarded`, until its claim is released or ends.
/// - `only_the_current_claim_marks_a_record_as_replayed`.
/// - `a_damaged_record_is_not_claimed`.
/// - `a_discarded_record_keeps_its_reason_and_stays_discarded`.
/// - `expired_records_of_every_status_are_removed`, and those that no operator handled are counted by group and topic.
/// - `a_record_that_is_being_replayed_is_not_removed`.
///
/// Every query reads a bounded number of rows, however many records are in quarantine. A row that cannot be read MUST be
/// reported and left out.
#[async_trait]
pub trait QuarantineStore: Quarantine {
    /// How many records are in quarantine, by group and topic. A pair whose last record has left has the count 0.
    async fn counts(&self) -> Result<Vec<QuarantineCount>, StoreError>;

    /// The records that meet the filter, newest first, after the cursor and at most `limit`.
    async fn list(
        &self,
        filter: &QuarantineFilter,
        after: Option<&QuarantineCursor>,
        limit: u32,
    ) -> Result<QuarantinePage, StoreError>;

    /// The records with these ids, in any order. Ids that do not exist are left out.
    async fn rows(&self, ids: &[String]) -> Result<Vec<QuarantinedRow>, StoreError>;

    /// One record with its value.
    async fn get(&self, id: &str) -> Result<Option<QuarantinedRecord>, StoreError>;

    /// Claims those of these records that are in quarantine, can be replayed and are not claimed, and returns them.
    async fn claim(
        &self,
        ids: &[String],
        claim_id: &str,
        lease: Duration,
    ) -> Result<Vec<QuarantinedRecord>, StoreError>;

    /// Makes the records that this claim still has REPLAYED. Returns their ids.
    async fn mark_replayed(&self, ids: &[String], claim_id: &str) -> Result<Vec<String>, StoreError>;

    /// Ends this claim of these records, which stay QUARANTINED, and notes why they were not replayed.
    async fn release(&self, ids: &[String], claim_id: &str, why: &str) -> Result<(), StoreError>;

    /// Makes those of these records DISCARDED that are in quarantine and not claimed. Returns their ids.
    async fn discard(&self, ids: &[String], reason: &str) -> Result<Vec<String>, StoreError>;

    /// Removes records that were quarantined longer than this ago, whatever their status: the oldest of each status
    /// first, at most `limit` of each, and none that is claimed. Records that another process is changing or removing
    /// are left to it.
    async fn remove_expired(&self, age: Duration, limit: usize) -> Result<ExpiredRecords, StoreError>;
}

/// Quarantined records that were removed because of their age.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpiredRecords {
    /// How many were removed; 0 if there are none left.
    pub removed: u64,
    /// How many of them no operator had replayed or discarded, sorted by group and topic.
    pub unhandled: Vec<QuarantineCount>,
}

impl ExpiredRecords {
    /// Counts removed records, each with its status, group and topic.
    pub fn count(records: impl IntoIterator<Item = (QuarantineStatus, String, String)>) -> Self {
        let (mut removed, mut unhandled) = (0, BTreeMap::new());
        for (status, group, topic) in records {
            removed += 1;
            if status == QuarantineStatus::Quarantined {
                *unhandled.entry((group, topic)).or_default() += 1;
            }
        }
        let count = |((group, topic), records)| QuarantineCount { group, topic, records };
        Self { removed, unhandled: unhandled.into_iter().map(count).collect() }
    }
}

/// The number of records that a group has in quarantine of one topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuarantineCount {
    /// The group.
    pub group: String,
    /// The topic.
    pub topic: String,
    /// The number of records with the status QUARANTINED.
    pub records: u64,
}

/// The state of a quarantined record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuarantineStatus {
    /// It waits for an operator.
    Quarantined,
    /// It was published again.
    Replayed,
    /// An operator has decided that it is not needed.
    Discarded,
}

impl QuarantineStatus {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Quarantined, Self::Replayed, Self::Discarded];

    /// The number in the column `status`.
    pub fn code(self) -> i16 {
        match self {
            Self::Quarantined => 0,
            Self::Replayed => 1,
            Self::Discarded => 2,
        }
    }

    /// The status of a number in the column `status`.
    pub fn of_code(code: i16) -> Self {
        match code {
            1 => Self::Replayed,
            2 => Self::Discarded,
            _ => Self::Quarantined,
        }
    }
}

/// Which records to list. Every given condition must hold.
#[derive(Clone, Debug, Default)]
pub struct QuarantineFilter {
    /// The group that could not read it.
    pub group: Option<String>,
    /// The topic.
    pub topic: Option<String>,
    /// The status; `None` for any.
    pub status: Option<QuarantineStatus>,
    /// Quarantined at or after this time.
    pub from: Option<DateTime<Utc>>,
    /// Quarantined at or before this time.
    pub to: Option<DateTime<Utc>>,
}

impl QuarantineFilter {
    /// The statuses that meet the filter.
    pub fn statuses(&self) -> &[QuarantineStatus] {
        match &self.status {
            Some(status) => std::slice::from_ref(status),
            None => &QuarantineStatus::ALL,
        }
    }
}

/// The end of a page of the list. Records that are quarantined between two requests are not on later pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuarantineCursor {
    /// When the last record of the page was quarantined.
    pub created_at: DateTime<Utc>,
    /// The id of that record.
    pub id: String,
}

impl QuarantineCursor {
    /// The cursor of the page after this record.
    pub fn after(last: &QuarantinedRow) -> Self {
        Self { created_at: last.created_at, id: last.id.clone() }
    }
}

impl fmt::Display for QuarantineCursor {
    /// `microseconds~id`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}~{}", self.created_at.timestamp_micros(), self.id)
    }
}

impl FromStr for QuarantineCursor {
    type Err = BadCursor;

    fn from_str(text: &str) -> Result<Self, BadCursor> {
        let (micros, id) = text.split_once('~').ok_or(BadCursor)?;
        let created_at = micros.parse().ok().and_then(DateTime::from_timestamp_micros).ok_or(BadCursor)?;
        let is_id = id.len() == 36 && id.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
        is_id.then(|| Self { created_at, id: id.to_owned() }).ok_or(BadCursor)
    }
}

/// One page of the list.
#[derive(Clone, Debug)]
pub struct QuarantinePage {
    /// The records of this page.
    pub items: Vec<QuarantinedRow>,
    /// How many records meet the filter.
    pub total: u64,
    /// True if there are more than `total`: long lists are not counted to their end.
    pub total_is_lower_bound: bool,
    /// The cursor of the next page, if there is one.
    pub next: Option<QuarantineCursor>,
}

/// A quarantined record without its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuarantinedRow {
    /// Its id, a UUID.
    pub id: String,
    /// The group that could not read it.
    pub group: String,
    /// Its topic.
    pub topic: String,
    /// Its partition.
    pub partition: u32,
    /// Its offset in the partition.
    pub offset: i64,
    /// Its key. A list shows the first 256 characters.
    pub key: String,
    /// The size of its value in bytes.
    pub size: u64,
    /// Why it could not be read. A list shows the first 1,000 characters.
    pub reason: String,
    /// Its state.
    pub status: QuarantineStatus,
    /// Why it was discarded, or why its last replay failed.
    pub status_reason: Option<String>,
    /// False if the bus itself could not read the record, or the database could not store it unchanged. It cannot be
    /// published as it was.
    pub is_replayable: bool,
    /// When it was quarantined.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
}

/// A quarantined record with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuarantinedRecord {
    /// The fields that a list shows, in full.
    pub row: QuarantinedRow,
    /// The body.
    pub value: Bytes,
    /// Names and values, in order.
    pub headers: Vec<(String, String)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_as_it_was_shown() {
        let id = "0190d0c0-1111-7abc-8def-0123456789ab".to_owned();
        let cursor =
            QuarantineCursor { created_at: DateTime::from_timestamp_micros(1_750_000_000_123_456).unwrap(), id };
        assert_eq!(cursor.to_string().parse(), Ok(cursor));
        for text in
            ["", "1", "1~x", "x~0190d0c0-1111-7abc-8def-0123456789ab", "1~0190d0c0-1111-7abc-8def-0123456789a\0"]
        {
            assert_eq!(text.parse::<QuarantineCursor>(), Err(BadCursor), "{text}");
        }
    }
}
