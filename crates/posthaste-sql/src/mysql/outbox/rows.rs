use std::sync::Arc;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use posthaste_core::Event;
use posthaste_core::outbox::{ClaimedRow, OutboxRow, OutboxStatus, Position};
use sqlx::Row;
use sqlx::mysql::MySqlRow;

use crate::outbox::{event_row, key_of, outbox_row};

/// The columns that [`read_event`] reads, from column 0.
pub(super) const EVENT_COLUMNS: &str = "event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service, \
     resource_type, operation_type, payload, payload_bytes, content_type, headers, occurred_at, created_at, \
     available_at, attempts, seq";
/// The number of the first column after those of the event.
const AFTER_EVENT: usize = 17;

/// The columns that [`due`] reads after them.
pub(super) const DUE_COLUMNS: &str = "status, lease_losses";

/// The size of a payload in bytes.
pub(super) const BYTES: &str = "CAST(COALESCE(OCTET_LENGTH(payload), OCTET_LENGTH(payload_bytes)) AS SIGNED)";

/// The columns that [`row`] reads after those of the event.
pub(super) const ROW_COLUMNS: &str = "status, done_at, last_error, locked_by, locked_at, lease_losses";

/// A row as a claim reads it.
pub(super) fn due(row: &MySqlRow) -> Result<ClaimedRow, sqlx::Error> {
    Ok(ClaimedRow {
        position: position(row.try_get(14)?, row.try_get(16)?),
        created_at: row.try_get(13)?,
        event: read_event(row),
        is_dead: OutboxStatus::of_code(row.try_get::<i16, _>(AFTER_EVENT)?.into()) == OutboxStatus::Dead,
        is_suspect: row.try_get::<i16, _>(AFTER_EVENT + 1)? > 0,
        key: None,
    })
}

pub(super) fn position(available_at: DateTime<Utc>, seq: i64) -> Position {
    Position { due: available_at.timestamp_micros(), seq }
}

/// The key of the event in this row.
pub(super) fn key(row: &MySqlRow) -> Result<Option<Arc<str>>, sqlx::Error> {
    Ok(key_of(row.try_get(2)?, row.try_get(3)?))
}

/// A row as an operator sees it.
pub(super) fn row(row: &MySqlRow) -> Result<OutboxRow, sqlx::Error> {
    outbox_row!(row, AFTER_EVENT, read_event(row))
}

fn read_event(row: &MySqlRow) -> Result<(u32, Event), String> {
    event_row!(row, payload(row)?)
}

fn payload(row: &MySqlRow) -> Result<(Option<String>, Option<Bytes>), String> {
    let text: Option<String> = row.try_get(8).map_err(|error| error.to_string())?;
    let bytes: Option<Vec<u8>> = row.try_get(9).map_err(|error| error.to_string())?;
    Ok((text, bytes.map(Bytes::from)))
}
