use bytes::Bytes;
use chrono::{DateTime, NaiveDateTime, Utc};
use posthaste_core::Event;
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::fill;
use crate::TableName;
use crate::outbox::{OutboxRow, OutboxStatus, read_headers};
use crate::sqlite::clock::time;

/// What [`read_event`] reads, from column 0.
const EVENT_COLUMNS: &str = "event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service, \
     resource_type, operation_type, payload, payload_bytes, content_type, headers, occurred_at, created_at";
/// The columns behind those of the event.
const AFTER_EVENT: usize = 14;

/// One event's row; the bind is its id.
pub(super) fn find(table: &TableName) -> String {
    fill(
        &format!(
            "SELECT {EVENT_COLUMNS}, status, attempts, due,
                 CAST(round((julianday(created_at) - 2440587.5) * 86400000) AS INTEGER),
                 CAST(round((julianday(done_at) - 2440587.5) * 86400000) AS INTEGER), last_error
             FROM {{table}} WHERE event_id = ?"
        ),
        table,
    )
}

/// What is due, in the order of delivery. Binds: the rows to leave out as a JSON array, the limit, the event type.
///
/// The index is named because every other way to these rows sorts or scans; statistics must not change that.
pub(super) fn pending(table: &TableName, of_one_type: bool) -> String {
    let (index, of_type) = reading(of_one_type);
    fill(
        &format!(
            "SELECT {EVENT_COLUMNS}, seq, attempts, coalesce(octet_length(payload), octet_length(payload_bytes))
             FROM {{table}} INDEXED BY {index}
             WHERE status IN (0, 2) {of_type} AND due <= {{now_ms}} AND seq NOT IN (SELECT value FROM json_each(?1))
             ORDER BY due, seq LIMIT ?2"
        ),
        table,
    )
}

/// How long until the first row is due that is not left out. Binds as [`pending`], the limit being ignored.
pub(super) fn next_due(table: &TableName, of_one_type: bool) -> String {
    let (index, of_type) = reading(of_one_type);
    fill(
        &format!(
            "SELECT due - {{now_ms}} FROM {{table}} INDEXED BY {index}
             WHERE status IN (0, 2) {of_type} AND seq NOT IN (SELECT value FROM json_each(?1))
             ORDER BY due, seq LIMIT min(?2, 1)"
        ),
        table,
    )
}

fn reading(of_one_type: bool) -> (&'static str, &'static str) {
    match of_one_type {
        true => ("{table}_pending_of_type", "AND event_type = ?3"),
        false => ("{table}_pending", ""),
    }
}

/// A pending row as the claim reads it.
pub(super) struct Pending {
    pub(super) seq: i64,
    /// The database's time of its insert.
    pub(super) created_at: DateTime<Utc>,
    /// How often it was tried, and what it is; or why that cannot be told.
    pub(super) event: Result<(u32, Event), String>,
    /// What its payload takes in memory, also when it is no event.
    pub(super) payload_bytes: usize,
}

impl Pending {
    pub(super) fn read(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        let seq = row.try_get(AFTER_EVENT)?;
        let attempts = row.try_get::<u32, _>(AFTER_EVENT + 1).map_err(|error| error.to_string());
        let event = attempts.and_then(|attempts| Ok((attempts, read_event(row)?)));
        let created_at = row.try_get::<Option<String>, _>(AFTER_EVENT - 1).ok().flatten();
        let created_at = created_at.and_then(|text| parse_time(&text)).unwrap_or_default();
        let payload_bytes = row.try_get::<Option<i64>, _>(AFTER_EVENT + 2)?.unwrap_or_default() as usize;
        Ok(Self { seq, created_at, event, payload_bytes })
    }
}

/// The answer to [`find`].
pub(super) fn read(row: &SqliteRow) -> Result<OutboxRow, sqlx::Error> {
    Ok(OutboxRow {
        event: read_event(row).ok(),
        status: OutboxStatus::of_code(row.try_get(AFTER_EVENT)?),
        attempts: row.try_get(AFTER_EVENT + 1)?,
        available_at: time(row.try_get(AFTER_EVENT + 2)?),
        created_at: time(row.try_get::<Option<i64>, _>(AFTER_EVENT + 3)?.unwrap_or_default()),
        done_at: row.try_get::<Option<i64>, _>(AFTER_EVENT + 4)?.map(time),
        last_error: row.try_get(AFTER_EVENT + 5)?,
    })
}

/// Any program may have written the row, so nothing in it is taken for granted.
fn read_event(row: &SqliteRow) -> Result<Event, String> {
    let text = |column: usize| row.try_get::<Option<String>, _>(column).map_err(|error| error.to_string());
    let bytes = row.try_get::<Option<Vec<u8>>, _>(9).map_err(|error| error.to_string())?;
    let headers = read_headers(text(11)?.as_deref())?;
    let occurred_at = match text(12)? {
        Some(written) => parse_time(&written).ok_or_else(|| format!("occurred_at {written:?} is not a time"))?,
        None => text(13)?.and_then(|created| parse_time(&created)).unwrap_or_default(),
    };
    Event::builder(text(1)?.unwrap_or_default())
        .id(text(0)?)
        .aggregate_type(text(2)?.unwrap_or_default())
        .aggregate_id(text(3)?)
        .tenant_id(text(4)?)
        .source_service(text(5)?)
        .resource_type(text(6)?)
        .operation_type(text(7)?)
        .text(text(8)?)
        .bytes(bytes.map(Bytes::from))
        .content_type(text(10)?)
        .headers(headers)
        .occurred_at(occurred_at)
        .build()
        .map_err(|error| error.to_string())
}

/// RFC 3339, or SQLite's own form, which is in UTC.
fn parse_time(text: &str) -> Option<DateTime<Utc>> {
    let rfc3339 = DateTime::parse_from_rfc3339(text).map(|time| time.with_timezone(&Utc));
    rfc3339.ok().or_else(|| NaiveDateTime::parse_from_str(text, "%Y-%m-%d %H:%M:%S%.f").ok().map(|time| time.and_utc()))
}
