use std::collections::BTreeSet;

use posthaste_core::{Delay, Event, Payload, StoreError};
use sqlx::{AssertSqlSafe, PgConnection};

use super::{Outbox, fill};
use crate::TableName;
use crate::outbox::write_headers;
use crate::postgres::clock::{micros, storable};
use crate::postgres::faults::store_error;

/// How many events one statement inserts, and how much their payloads weigh but for one that is larger alone.
const CHUNK: usize = 1_000;
const CHUNK_BYTES: usize = 16 << 20;

impl Outbox {
    /// Writes an event in the caller's transaction and answers with its id.
    ///
    /// It is delivered once the transaction has committed, and never if it does not. The commit cannot be seen from
    /// here: the source looks a few times within the next moments, and at once after [`committed`](Self::committed).
    pub async fn write(&self, connection: &mut PgConnection, event: &Event) -> Result<String, StoreError> {
        insert(connection, &self.0.table, std::slice::from_ref(event)).await.map_err(write_failed)?;
        self.wake_soon([event]);
        Ok(event.id().to_owned())
    }

    /// Writes events in the caller's transaction, in this order, and answers with their ids. See [`write`](Self::write).
    pub async fn write_all(&self, connection: &mut PgConnection, events: &[Event]) -> Result<Vec<String>, StoreError> {
        for chunk in chunks(events) {
            insert(connection, &self.0.table, chunk).await.map_err(write_failed)?;
        }
        self.wake_soon(events);
        Ok(events.iter().map(|event| event.id().to_owned()).collect())
    }

    fn wake_soon<'a>(&self, events: impl IntoIterator<Item = &'a Event>) {
        for event_type in events.into_iter().map(Event::event_type).collect::<BTreeSet<_>>() {
            if let Some(lane) = self.lane_of(event_type) {
                lane.wakeup.wake_soon();
            }
        }
    }
}

/// Parts of a size that one statement can carry.
fn chunks(mut events: &[Event]) -> impl Iterator<Item = &[Event]> {
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fitting = events.iter().take(CHUNK).take_while(|event| {
            let fits = bytes == 0 || bytes + event.weight() <= CHUNK_BYTES;
            bytes += event.weight();
            fits
        });
        let (chunk, rest) = events.split_at(fitting.count());
        events = rest;
        (!chunk.is_empty()).then_some(chunk)
    })
}

/// Numbers are given in the order of the arrays, which is that of the events.
const INSERT: &str = "INSERT INTO {table} (event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service,
         resource_type, operation_type, payload, payload_bytes, content_type, headers, occurred_at, created_at,
         available_at)
     SELECT event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service, resource_type, operation_type,
         payload, payload_bytes, content_type, headers, occurred_at, {now},
         coalesce(until, {now} + wait * interval '1 microsecond')
     FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
             $9::text[], $10::bytea[], $11::text[], $12::text[], $13::timestamptz[], $14::timestamptz[], $15::bigint[])
         WITH ORDINALITY AS event (event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service,
             resource_type, operation_type, payload, payload_bytes, content_type, headers, occurred_at, until, wait, place)
     ORDER BY place";

async fn insert(connection: &mut PgConnection, table: &TableName, events: &[Event]) -> Result<(), sqlx::Error> {
    fn column<'a, T>(events: &'a [Event], of: impl Fn(&'a Event) -> T) -> Vec<T> {
        events.iter().map(of).collect()
    }
    let insert = sqlx::query(AssertSqlSafe(fill(INSERT, table)))
        .bind(column(events, Event::id))
        .bind(column(events, Event::event_type))
        .bind(column(events, Event::aggregate_type))
        .bind(column(events, Event::aggregate_id))
        .bind(column(events, Event::tenant_id))
        .bind(column(events, Event::source_service))
        .bind(column(events, Event::resource_type))
        .bind(column(events, Event::operation_type))
        .bind(column(events, |event| text_of(event.payload())))
        .bind(column(events, |event| match text_of(event.payload()) {
            Some(_) => None,
            None => Some(event.payload().as_bytes()),
        }))
        .bind(column(events, Event::content_type))
        .bind(column(events, |event| write_headers(event.headers())))
        .bind(column(events, |event| storable(event.occurred_at())))
        .bind(column(events, |event| match event.delay() {
            Delay::Until(at) => Some(storable(at)),
            Delay::None | Delay::For(_) => None,
        }))
        .bind(column(events, |event| match event.delay() {
            Delay::For(wait) => micros(wait),
            Delay::None | Delay::Until(_) => 0,
        }));
    insert.execute(connection).await.map(|_| ())
}

/// No text of PostgreSQL holds the character U+0000: a payload with it is kept, and read, as bytes.
fn text_of(payload: &Payload) -> Option<&str> {
    match payload {
        Payload::Text(text) if !text.contains('\0') => Some(text),
        Payload::Text(_) | Payload::Bytes(_) => None,
    }
}

fn write_failed(error: sqlx::Error) -> StoreError {
    store_error("write to the outbox", error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_carries_a_thousand_events_or_sixteen_mebibytes() {
        let event = |length: usize| Event::builder("t").text("x".repeat(length)).build().unwrap();
        let lengths = |events: &[Event]| chunks(events).map(<[Event]>::len).collect::<Vec<_>>();
        assert_eq!(lengths(&[]), [0; 0]);
        assert_eq!(lengths(&vec![event(1); 2_100]), [1_000, 1_000, 100]);
        assert_eq!(lengths(&vec![event(1_048_576); 20]), [15, 5]);
    }
}
