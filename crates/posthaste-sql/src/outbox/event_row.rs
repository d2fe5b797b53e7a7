use bytes::Bytes;
use chrono::{DateTime, Utc};
use posthaste_core::Event;

use super::read_headers;

/// The columns of an event as a driver has read them. Any program may have written the row, so every column is checked.
pub(crate) struct EventRow {
    pub(crate) event_id: Option<String>,
    pub(crate) event_type: Option<String>,
    pub(crate) aggregate_type: Option<String>,
    pub(crate) aggregate_id: Option<String>,
    pub(crate) tenant_id: Option<String>,
    pub(crate) source_service: Option<String>,
    pub(crate) resource_type: Option<String>,
    pub(crate) operation_type: Option<String>,
    pub(crate) payload: Option<String>,
    pub(crate) payload_bytes: Option<Bytes>,
    pub(crate) content_type: Option<String>,
    pub(crate) headers: Option<String>,
    /// `None` where the writer gave none.
    pub(crate) occurred_at: Option<DateTime<Utc>>,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) available_at: DateTime<Utc>,
    pub(crate) attempts: i64,
}

/// The times of an event's row.
pub(crate) struct EventTimes {
    /// `None` where the writer gave none.
    pub(crate) occurred_at: Option<DateTime<Utc>>,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) available_at: DateTime<Utc>,
}

impl EventRow {
    /// A row whose texts are in columns 0 to 7, 10 and 11.
    pub(crate) fn read(
        text: impl Fn(usize) -> Result<Option<String>, String>,
        (payload, payload_bytes): (Option<String>, Option<Bytes>),
        EventTimes { occurred_at, created_at, available_at }: EventTimes,
        attempts: i64,
    ) -> Result<Self, String> {
        Ok(Self {
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
            created_at,
            available_at,
            attempts,
        })
    }

    /// The number of attempts and the event, or the reason why the row is not a valid event.
    pub(crate) fn into_event(self) -> Result<(u32, Event), String> {
        let attempts =
            u32::try_from(self.attempts).map_err(|_| format!("attempts {} is negative or too large", self.attempts))?;
        let occurred_at = self.occurred_at.unwrap_or(self.created_at);
        // A retry overwrites `available_at`, so only a row without attempts still shows the delay that its writer
        // chose.
        let is_delayed = attempts == 0 && self.available_at > self.created_at && self.available_at > occurred_at;
        let event = Event::builder(self.event_type.unwrap_or_default())
            .id(self.event_id)
            .aggregate_type(self.aggregate_type.unwrap_or_default())
            .aggregate_id(self.aggregate_id)
            .tenant_id(self.tenant_id)
            .source_service(self.source_service)
            .resource_type(self.resource_type)
            .operation_type(self.operation_type)
            .text(self.payload)
            .bytes(self.payload_bytes)
            .content_type(self.content_type)
            .headers(read_headers(self.headers.as_deref())?)
            .occurred_at(occurred_at)
            .available_at(is_delayed.then_some(self.available_at))
            .build()
            .map_err(|error| error.to_string())?;
        Ok((attempts, event))
    }
}

/// Reads the event in columns 0 to 16 of a row of PostgreSQL or MySQL. `$payload` is the expression that reads its
/// payload.
#[cfg(any(feature = "postgres", feature = "mysql"))]
macro_rules! event_row {
    ($row:expr, $payload:expr) => {{
        let text = |column: usize| $row.try_get::<Option<String>, _>(column).map_err(|error| error.to_string());
        let time = |column: usize| $row.try_get::<Option<DateTime<Utc>>, _>(column).map_err(|error| error.to_string());
        let times = crate::outbox::EventTimes {
            occurred_at: time(12)?,
            created_at: time(13)?.unwrap_or_default(),
            available_at: time(14)?.unwrap_or_default(),
        };
        let attempts = $row.try_get::<i32, _>(15).map_err(|error| error.to_string())?;
        crate::outbox::EventRow::read(text, $payload, times, attempts.into())?.into_event()
    }};
}
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) use event_row;

/// Reads a row of PostgreSQL or MySQL as an operator sees it: the event, and from column `$after` on its status,
/// `done_at`, `last_error`, `locked_by`, `locked_at` and `lease_losses`.
#[cfg(any(feature = "postgres", feature = "mysql"))]
macro_rules! outbox_row {
    ($row:expr, $after:expr, $event:expr) => {
        Ok(posthaste_core::outbox::OutboxRow {
            event_id: $row.try_get(0)?,
            event: $event.ok().map(|(_, event)| event),
            created_at: $row.try_get(13)?,
            available_at: $row.try_get(14)?,
            attempts: $row.try_get::<i32, _>(15)?.max(0) as u32,
            seq: $row.try_get(16)?,
            status: OutboxStatus::of_code($row.try_get::<i16, _>($after)?.into()),
            done_at: $row.try_get($after + 1)?,
            last_error: $row.try_get($after + 2)?,
            locked_by: $row.try_get($after + 3)?,
            locked_at: $row.try_get($after + 4)?,
            lease_losses: $row.try_get::<i16, _>($after + 5)?.max(0) as u32,
        })
    };
}
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) use outbox_row;

/// Binds the columns of an event from `event_id` to `headers`, given its payload as text or as bytes.
macro_rules! bind_event {
    ($query:expr, $event:expr, $text:expr, $bytes:expr) => {
        $query
            .bind($event.id())
            .bind($event.event_type())
            .bind($event.aggregate_type())
            .bind($event.aggregate_id())
            .bind($event.tenant_id())
            .bind($event.source_service())
            .bind($event.resource_type())
            .bind($event.operation_type())
            .bind($text)
            .bind($bytes)
            .bind($event.content_type())
            .bind(crate::outbox::write_headers($event.headers()))
    };
}
pub(crate) use bind_event;
