use std::sync::Arc;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use posthaste_core::Event;
use posthaste_core::outbox::{ClaimedRow, OutboxRow, OutboxStatus, Position};
use sqlx::sqlite::SqliteRow;
use sqlx::{Row, TypeInfo, ValueRef};

use crate::outbox::{EventRow, key_of};
use crate::sqlite::clock::{millis_of, millis_sql, time};

/// The columns that [`read_event`] reads, from column 0.
pub(super) const EVENT_COLUMNS: &str = concat!(
    "event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service, resource_type, operation_type, \
     payload, payload_bytes, content_type, headers, occurred_at, ",
    millis_sql!("created_at"),
    ", due, attempts, seq, ",
    millis_sql!("occurred_at")
);
/// The number of the first column after those of the event.
const AFTER_EVENT: usize = 18;

/// The columns that [`due`] reads after them.
pub(super) const DUE_COLUMNS: &str =
    "coalesce(octet_length(payload), octet_length(payload_bytes)), status, lease_losses > 0";

/// The columns that [`row`] reads after those of the event.
pub(super) fn row_columns() -> String {
    let (done_at, locked_at) = (millis_of("done_at"), millis_of("locked_at"));
    format!("status, {done_at}, last_error, locked_by, {locked_at}, CAST(lease_losses AS INTEGER)")
}

/// A row as a claim reads it.
pub(super) struct Due {
    pub(super) row: ClaimedRow,
    /// The size of its payload, also if the row is not a valid event.
    pub(super) payload_bytes: usize,
}

pub(super) fn due(row: &SqliteRow) -> Result<Due, sqlx::Error> {
    let claimed = ClaimedRow {
        position: Position { due: row.try_get(14)?, seq: row.try_get(16)? },
        created_at: created_at(row)?,
        event: read_event(row),
        is_dead: OutboxStatus::of_code(row.try_get(AFTER_EVENT + 1)?) == OutboxStatus::Dead,
        is_suspect: row.try_get(AFTER_EVENT + 2)?,
        key: None,
    };
    let payload_bytes = row.try_get::<Option<i64>, _>(AFTER_EVENT)?.unwrap_or_default().max(0) as usize;
    Ok(Due { row: claimed, payload_bytes })
}

/// The key of the event whose aggregate is in these columns. Aggregates that are not text in UTF-8 may share a key:
/// their rows are not valid events, and become DEAD one after the other.
pub(super) fn key(row: &SqliteRow, aggregate_type: usize, aggregate_id: usize) -> Option<Arc<str>> {
    key_of(&text(row, aggregate_type).unwrap_or_default(), text(row, aggregate_id).as_deref())
}

/// A row as an operator sees it.
pub(super) fn row(row: &SqliteRow) -> Result<OutboxRow, sqlx::Error> {
    Ok(OutboxRow {
        event_id: text(row, 0).unwrap_or_default(),
        event: read_event(row).ok().map(|(_, event)| event),
        available_at: time(row.try_get(14)?),
        attempts: row.try_get::<i64, _>(15).map_or(0, |attempts| attempts.max(0) as u32),
        seq: row.try_get(16)?,
        status: OutboxStatus::of_code(row.try_get(AFTER_EVENT)?),
        created_at: created_at(row)?,
        done_at: row.try_get::<Option<i64>, _>(AFTER_EVENT + 1)?.map(time),
        last_error: text(row, AFTER_EVENT + 2),
        locked_by: text(row, AFTER_EVENT + 3),
        locked_at: row.try_get::<Option<i64>, _>(AFTER_EVENT + 4)?.map(time),
        lease_losses: row.try_get::<i64, _>(AFTER_EVENT + 5)?.max(0) as u32,
    })
}

fn created_at(row: &SqliteRow) -> Result<DateTime<Utc>, sqlx::Error> {
    Ok(time(row.try_get::<Option<i64>, _>(13)?.unwrap_or_default()))
}

/// The text in a column. Bytes that are not UTF-8 are replaced.
pub(super) fn text(row: &SqliteRow, column: usize) -> Option<String> {
    let bytes = row.try_get_unchecked::<Option<Vec<u8>>, _>(column).ok().flatten()?;
    Some(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

fn read_event(row: &SqliteRow) -> Result<(u32, Event), String> {
    let text = |column: usize| row.try_get::<Option<String>, _>(column).map_err(|error| error.to_string());
    let (payload, payload_bytes) = payload(row).map_err(|error| error.to_string())?;
    let occurred_at = match text(12)? {
        Some(written) => {
            Some(occurred_at(row, &written).ok_or_else(|| format!("occurred_at {written:?} is not a time"))?)
        }
        None => None,
    };
    let row = EventRow {
        event_id: text(0)?,
        event_type: text(1)?,
        aggregate_type: text(2)?,
        aggregate_id: text(3)?,
        tenant_id: text(4)?,
        source_service: text(5)?,
        resource_type: text(6)?,
        operation_type: text(7)?,
        payload,
        payload_bytes,
        content_type: text(10)?,
        headers: text(11)?,
        occurred_at,
        created_at: created_at(row).map_err(|error| error.to_string())?,
        available_at: time(row.try_get(14).map_err(|error| error.to_string())?),
        attempts: row.try_get(15).map_err(|error| error.to_string())?,
    };
    row.into_event()
}

/// The payload as text or as bytes. The type of the value decides, not the column: many languages store bytes as a BLOB
/// in the column for texts too. A BLOB is delivered byte for byte, UTF-8 or not.
fn payload(row: &SqliteRow) -> Result<(Option<String>, Option<Bytes>), sqlx::Error> {
    let value = row.try_get_raw(8)?;
    let is_blob = !value.is_null() && value.type_info().name() == "BLOB";
    let bytes: Option<Vec<u8>> = row.try_get(if is_blob { 8 } else { 9 })?;
    let text = if is_blob { None } else { row.try_get(8)? };
    Ok((text, bytes.map(Bytes::from)))
}

/// To the nanosecond if the text has the form that we write; otherwise as SQLite reads it.
fn occurred_at(row: &SqliteRow, written: &str) -> Option<DateTime<Utc>> {
    let rfc3339 = DateTime::parse_from_rfc3339(written).map(|time| time.with_timezone(&Utc));
    rfc3339.ok().or_else(|| row.try_get::<Option<i64>, _>(AFTER_EVENT - 1).ok().flatten().map(time))
}
