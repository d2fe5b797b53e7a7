use std::sync::Arc;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use posthaste_core::Event;
use posthaste_core::outbox::{ClaimedRow, OutboxRow, OutboxStatus, Position};
use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::outbox::{event_row, key_of, outbox_row};

/// The columns that [`read_event`] reads, from column 0.
pub(super) const EVENT_COLUMNS: &str = "event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service, \
     resource_type, operation_type, payload, payload_bytes, content_type, headers, occurred_at, created_at, \
     available_at, attempts, seq, payload_is_text";
/// The number of the first column after those of the event.
const AFTER_EVENT: usize = 18;

/// The columns that [`due`] reads after them. The length of a payload is known without reading it, even if the payload
/// is stored out of line.
pub(super) const DUE_COLUMNS: &str =
    "coalesce(octet_length(payload), octet_length(payload_bytes)) AS bytes, status, lease_losses";

/// The columns that [`row`] reads after those of the event.
pub(super) const ROW_COLUMNS: &str = "status, done_at, last_error, locked_by, locked_at, lease_losses";

/// A row as a claim reads it.
pub(super) struct Due {
    pub(super) row: ClaimedRow,
    /// The size of its payload, also if the row is not a valid event.
    pub(super) payload_bytes: usize,
}

pub(super) fn due(row: &PgRow) -> Result<Due, sqlx::Error> {
    let claimed = ClaimedRow {
        position: position(row.try_get(14)?, row.try_get(16)?),
        created_at: row.try_get(13)?,
        event: read_event(row),
        is_dead: OutboxStatus::of_code(row.try_get::<i16, _>(AFTER_EVENT + 1)?.into()) == OutboxStatus::Dead,
        is_suspect: row.try_get::<i16, _>(AFTER_EVENT + 2)? > 0,
        key: None,
    };
    Ok(Due { row: claimed, payload_bytes: row.try_get::<i32, _>(AFTER_EVENT)?.max(0) as usize })
}

pub(super) fn position(available_at: DateTime<Utc>, seq: i64) -> Position {
    Position { due: available_at.timestamp_micros(), seq }
}

/// The key of the event in this row.
pub(super) fn key(row: &PgRow) -> Result<Option<Arc<str>>, sqlx::Error> {
    Ok(key_of(row.try_get(2)?, row.try_get(3)?))
}

/// A row as an operator sees it.
pub(super) fn row(row: &PgRow) -> Result<OutboxRow, sqlx::Error> {
    outbox_row!(row, AFTER_EVENT, read_event(row))
}

fn read_event(row: &PgRow) -> Result<(u32, Event), String> {
    event_row!(row, payload(row)?)
}

/// The payload as text or as bytes. PostgreSQL cannot store U+0000 in a text: a payload with it is stored as bytes and
/// marked as text.
fn payload(row: &PgRow) -> Result<(Option<String>, Option<Bytes>), String> {
    let text: Option<String> = row.try_get(8).map_err(|error| error.to_string())?;
    let bytes: Option<Vec<u8>> = row.try_get(9).map_err(|error| error.to_string())?;
    let is_text: Option<bool> = row.try_get(AFTER_EVENT - 1).map_err(|error| error.to_string())?;
    match (text, bytes) {
        (None, Some(bytes)) if is_text == Some(true) => {
            let text = String::from_utf8(bytes).map_err(|error| format!("payload_bytes is no text: {error}"))?;
            Ok((Some(text), None))
        }
        (text, bytes) => Ok((text, bytes.map(Bytes::from))),
    }
}
