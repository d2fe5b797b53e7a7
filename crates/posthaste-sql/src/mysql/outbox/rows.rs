use std::sync::Arc;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use posthaste_core::Event;
use posthaste_core::outbox::{OutboxRow, OutboxStatus, ClaimedRow, Position};
use sqlx::Row;
use sqlx::mysql::MySqlRow;

use crate::outbox::{delayed_until, key_of, read_headers};

/// What [`read_event`] reads, from column 0.
pub(super) const EVENT_COLUMNS: &str = "event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service, \
     resource_type, operation_type, payload, payload_bytes, content_type, headers, occurred_at, created_at, \
     available_at, attempts, seq";
/// The columns behind those of the event.
const AFTER_EVENT: usize = 17;

/// What [`due`] reads behind them.
pub(super) const DUE_COLUMNS: &str = "status, lease_losses";

/// What a payload weighs.
pub(super) const BYTES: &str = "CAST(COALESCE(OCTET_LENGTH(payload), OCTET_LENGTH(payload_bytes)) AS SIGNED)";

/// What [`row`] reads behind them.
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
    Ok(OutboxRow {
        event_id: row.try_get(0)?,
        event: read_event(row).ok().map(|(_, event)| event),
        created_at: row.try_get(13)?,
        available_at: row.try_get(14)?,
        attempts: row.try_get::<i32, _>(15)?.max(0) as u32,
        seq: row.try_get(16)?,
        status: OutboxStatus::of_code(row.try_get::<i16, _>(AFTER_EVENT)?.into()),
        done_at: row.try_get(AFTER_EVENT + 1)?,
        last_error: row.try_get(AFTER_EVENT + 2)?,
        locked_by: row.try_get(AFTER_EVENT + 3)?,
        locked_at: row.try_get(AFTER_EVENT + 4)?,
        lease_losses: row.try_get::<i16, _>(AFTER_EVENT + 5)?.max(0) as u32,
    })
}

/// How often the event was tried, and what it is. Any program may have written the row, so nothing in it is taken for
/// granted.
fn read_event(row: &MySqlRow) -> Result<(u32, Event), String> {
    let text = |column: usize| row.try_get::<Option<String>, _>(column).map_err(|error| error.to_string());
    let time = |column: usize| row.try_get::<Option<DateTime<Utc>>, _>(column).map_err(|error| error.to_string());
    let bytes = row.try_get::<Option<Vec<u8>>, _>(9).map_err(|error| error.to_string())?;
    let attempts = row.try_get::<i32, _>(15).map_err(|error| error.to_string())?;
    let attempts = u32::try_from(attempts).map_err(|_| format!("attempts {attempts} is negative"))?;
    let (created_at, available_at) = (time(13)?.unwrap_or_default(), time(14)?.unwrap_or_default());
    let occurred_at = time(12)?.unwrap_or(created_at);
    let event = Event::builder(text(1)?.unwrap_or_default())
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
        .headers(read_headers(text(11)?.as_deref())?)
        .occurred_at(occurred_at)
        .available_at(delayed_until(available_at, created_at, occurred_at, attempts))
        .build()
        .map_err(|error| error.to_string())?;
    Ok((attempts, event))
}
