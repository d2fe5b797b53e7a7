//! What the outbox has in common in every database, and no SQL.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use posthaste_core::Event;

pub(crate) use self::headers::{read_headers, write_headers};
pub(crate) use self::sweeper::{Sweeper, SWEEP_BATCH};

mod headers;
mod sweeper;

/// How many events one statement inserts, and how much their payloads weigh but for one that is larger alone.
const CHUNK: usize = 500;
const CHUNK_BYTES: usize = 8 << 20;

/// How many rows of each key are unblocked when rows of so many keys are finished together: as many as a claim takes in
/// all. What is unblocked and not claimed is blocked again, so more would cost more than it brings.
pub(crate) fn unblocked(keys: usize) -> usize {
    (CHUNK / keys.max(1)).clamp(5, 100)
}

/// In microseconds, how soon a lease is looked at again that seems to have ended: its row may be locked by somebody.
pub(crate) const SOONEST_TAKEOVER: i64 = 100_000;

/// Parts of a size that one statement can carry.
pub(crate) fn chunks<'a, 'e>(mut events: &'a [&'e Event]) -> impl Iterator<Item = &'a [&'e Event]> {
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

/// What the events of one aggregate have in common, and no others; nothing where there is no aggregate id.
pub(crate) fn key_of(aggregate_type: &str, aggregate_id: Option<&str>) -> Option<Arc<str>> {
    // The length tells where the type ends, whatever characters there are.
    aggregate_id.map(|id| format!("{}:{aggregate_type}:{id}", aggregate_type.len()).into())
}

/// Until when an event was delayed by who wrote it, as far as its row still tells: a retry overwrites it.
pub(crate) fn delayed_until(
    available_at: DateTime<Utc>,
    created_at: DateTime<Utc>,
    occurred_at: DateTime<Utc>,
    attempts: u32,
) -> Option<DateTime<Utc>> {
    let is_delayed = attempts == 0 && available_at > created_at && available_at > occurred_at;
    is_delayed.then_some(available_at)
}

/// The nearest time from `earliest` to the end of the year 9999, after which no database of ours knows a time.
pub(crate) fn storable(at: DateTime<Utc>, earliest: DateTime<Utc>) -> DateTime<Utc> {
    const LAST_MICROS: i64 = 253_402_300_799_999_999;
    at.clamp(earliest, DateTime::from_timestamp_micros(LAST_MICROS).unwrap_or(DateTime::<Utc>::MAX_UTC))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_carries_five_hundred_events_or_eight_mebibytes() {
        let event = |length: usize| Event::text("t", "x".repeat(length)).build().unwrap();
        let lengths = |event: &Event, count: usize| {
            let events = vec![event; count];
            chunks(&events).map(<[&Event]>::len).collect::<Vec<_>>()
        };
        assert_eq!(lengths(&event(1), 0), [0; 0]);
        assert_eq!(lengths(&event(1), 1_100), [500, 500, 100]);
        assert_eq!(lengths(&event(1_048_576), 10), [7, 3]);
    }

    #[test]
    fn keys_do_not_run_into_each_other() {
        assert_ne!(key_of("a:b", Some("c")), key_of("a", Some("b:c")));
        assert_eq!(key_of("a", None), None);
    }
}
