//! The parts of the built-in bus that all databases share. They contain no SQL.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use posthaste_core::bus::{Fetched, Position};
use posthaste_core::hub_store::{GroupProgress, LogEntry, READ_RECORDS, TopicState};
use posthaste_core::log::StoredRecord;
use posthaste_core::{BoxError, FaultKind, Progress, StoreError};

use crate::unreadable::report;

/// The maximum size of one read. A single record may be larger.
pub(crate) const MAX_READ_BYTES: usize = 16 << 20;

/// How many expired records one statement removes. Other writes to the partition wait meanwhile.
pub(crate) const REMOVED_AT_ONCE: u32 = 1_000;

/// The maximum number of records that are shown of one event. Each has its value, which may be a mebibyte.
pub(crate) const SHOWN_RECORDS: u32 = 200;

/// The error for a value that this crate cannot write as JSON.
pub(crate) fn unwritable(doing: &'static str, source: impl Into<BoxError>) -> StoreError {
    StoreError::new(doing, FaultKind::Permanent, source)
}

/// The stored text: NULL if there are no headers, which is the most common case.
pub(crate) fn headers_to_text(headers: &[(String, String)]) -> Result<Option<String>, serde_json::Error> {
    if headers.is_empty() { Ok(None) } else { serde_json::to_string(headers).map(Some) }
}

/// Fills in the headers of a record that was read. `raw` is the stored text, for the quarantine.
pub(crate) fn read_headers(
    record: &mut StoredRecord,
    text: Result<Option<String>, sqlx::Error>,
    raw: impl Fn() -> String,
) {
    let headers = text.map_err(|error| error.to_string()).and_then(|text| {
        text.map_or(Ok(Vec::new()), |text| serde_json::from_str(&text).map_err(|error| error.to_string()))
    });
    match headers {
        Ok(headers) => record.headers = headers,
        Err(error) => {
            record.damage = Some(format!("headers are no JSON array of [name, value] pairs: {error}"));
            record.headers.push(("unreadable".to_owned(), raw()));
        }
    }
}

/// A record that was read for an operator, outside of any group.
pub(crate) fn inspected(topic: &Arc<str>, partition: u32, record: StoredRecord) -> Fetched {
    let StoredRecord { offset, key, value, headers, damage, .. } = record;
    let position = Position { topic: Arc::clone(topic), partition, offset, generation: 0 };
    Fetched { position, key, value, headers, damage }
}

/// The share of each partition in the limit of a read, see `BusInspector::read`.
pub(crate) fn share_of_read(limit: usize, partitions: usize) -> usize {
    limit.min(READ_RECORDS).div_ceil(partitions.max(1))
}

/// Each topic with the ids of its partitions. The rows are sorted by partition.
pub(crate) fn partitions_of_topics(rows: Vec<(String, i64)>) -> Vec<(String, Vec<i64>)> {
    let mut topics: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    for (topic, id) in rows {
        topics.entry(topic).or_default().push(id);
    }
    topics.into_iter().collect()
}

/// The progress of a group. If the completed set cannot be read, all records from the watermark on are delivered again.
/// That may repeat deliveries, but loses none.
pub(crate) fn progress(watermark: i64, completed: &str, key: impl Fn() -> String) -> Progress {
    Progress::decode(watermark, completed).unwrap_or_else(|error| {
        report("log_group", &key(), &format_args!("{error}; deliveries after offset {watermark} repeat"));
        Progress::at(watermark)
    })
}

/// The key by which an operator finds a progress row.
pub(crate) fn key_of(group: &str, topic: &str, partition: impl Display) -> String {
    format!("{group} {topic} {partition}")
}

/// A number of rows.
pub(crate) fn count(value: i64) -> usize {
    usize::try_from(value).unwrap_or_default()
}

/// A record of an event, with one group that reads it.
pub(crate) struct EntryRow {
    pub(crate) topic: String,
    pub(crate) partition: u32,
    pub(crate) offset: i64,
    pub(crate) value: Vec<u8>,
    pub(crate) created_at: DateTime<Utc>,
    /// The group, its watermark and its completed set.
    pub(crate) group: Option<(String, i64, String)>,
}

/// Joins the groups of each record. The rows of one record follow each other.
pub(crate) fn entries(rows: Vec<EntryRow>) -> Vec<LogEntry> {
    let mut entries: Vec<LogEntry> = Vec::new();
    for EntryRow { topic, partition, offset, value, created_at, group } in rows {
        let is_this = |last: &LogEntry| (&last.topic, last.partition, last.offset) == (&topic, partition, offset);
        if !entries.last().is_some_and(is_this) {
            let value = Bytes::from(value);
            entries.push(LogEntry { topic, partition, offset, value, created_at, groups: Vec::new() });
        }
        if let (Some((group, watermark, completed)), Some(entry)) = (group, entries.last_mut()) {
            // An unreadable completed set counts as empty, as it does for the consumer.
            let progress = Progress::decode(watermark, &completed).unwrap_or(Progress::at(watermark));
            entry.groups.push(GroupProgress { group, done: progress.is_done(offset) });
        }
    }
    entries
}

/// Topic, partition, first and next offset, with one group that reads it and its watermark.
pub(crate) type TopicRow = (String, u32, i64, i64, Option<String>, Option<i64>);

/// Joins the groups of each partition. The rows of one partition follow each other.
pub(crate) fn topics(rows: Vec<TopicRow>) -> Vec<TopicState> {
    let mut topics: Vec<TopicState> = Vec::new();
    for (topic, partition, first_offset, next_offset, group, watermark) in rows {
        if !topics.last().is_some_and(|last| last.topic == topic && last.partition == partition) {
            topics.push(TopicState { topic, partition, first_offset, next_offset, groups: Vec::new() });
        }
        if let Some(state) = topics.last_mut() {
            state.groups.extend(group.zip(watermark));
        }
    }
    topics
}
