//! The parts of the outbox that all databases share. They contain no SQL.

use std::sync::Arc;
#[cfg(any(feature = "postgres", feature = "mysql"))]
use std::time::Duration;

#[cfg(any(feature = "postgres", feature = "mysql"))]
use chrono::{DateTime, Utc};

pub(crate) use self::event_row::{EventRow, EventTimes, bind_event};
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) use self::event_row::{event_row, outbox_row};
pub(crate) use self::headers::{read_headers, write_headers};

mod event_row;
mod headers;

/// One statement inserts at most this many rows and this many bytes of payload, unless a single row is larger.
const CHUNK: usize = 500;
const CHUNK_BYTES: usize = 8 << 20;

/// In microseconds: the shortest wait before a claim looks again at a row whose lease has ended but that it could not
/// claim. Another transaction may have locked the row.
pub(crate) const SOONEST_TAKEOVER: i64 = 100_000;

/// Splits rows into parts that fit into one statement.
pub(crate) fn chunks<T>(mut rows: &[T], weight: impl Fn(&T) -> usize) -> impl Iterator<Item = &[T]> {
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fitting = rows.iter().take(CHUNK).take_while(|row| {
            let fits = bytes == 0 || bytes + weight(row) <= CHUNK_BYTES;
            bytes += weight(row);
            fits
        });
        let (chunk, rest) = rows.split_at(fitting.count());
        rows = rest;
        (!chunk.is_empty()).then_some(chunk)
    })
}

/// The ordering key of an aggregate; `None` where there is no aggregate id. Two aggregates never have the same key.
pub(crate) fn key_of(aggregate_type: &str, aggregate_id: Option<&str>) -> Option<Arc<str>> {
    // The length marks where the type ends, whatever characters it contains.
    aggregate_id.map(|id| format!("{}:{aggregate_type}:{id}", aggregate_type.len()).into())
}

/// A number of rows as SQL binds it.
pub(crate) fn limit(rows: usize) -> i64 {
    i64::try_from(rows).unwrap_or(i64::MAX)
}

/// The longest wait that is added to a clock: the tables refuse times after the year 9999.
#[cfg(any(feature = "postgres", feature = "mysql"))]
const LONGEST_WAIT: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// A wait as microseconds, for an interval.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) fn micros(wait: Duration) -> i64 {
    wait.min(LONGEST_WAIT).as_micros() as i64
}

/// A duration that the database returned in microseconds. A negative one becomes zero.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) fn span(micros: i64) -> Duration {
    Duration::from_micros(micros.max(0) as u64)
}

/// `at`, clamped to the range from `earliest` to the end of the year 9999: none of our databases stores a later time.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) fn storable(at: DateTime<Utc>, earliest: DateTime<Utc>) -> DateTime<Utc> {
    const LAST_MICROS: i64 = 253_402_300_799_999_999;
    at.clamp(earliest, DateTime::from_timestamp_micros(LAST_MICROS).unwrap_or(DateTime::<Utc>::MAX_UTC))
}

#[cfg(test)]
mod tests {
    use posthaste_core::Event;

    use super::*;

    #[test]
    fn a_statement_carries_five_hundred_rows_or_eight_mebibytes() {
        let event = |length: usize| Event::text("t", "x".repeat(length)).build().unwrap();
        let lengths = |event: &Event, count: usize| {
            let events = vec![event; count];
            chunks(&events, |event| event.weight()).map(<[&Event]>::len).collect::<Vec<_>>()
        };
        assert_eq!(lengths(&event(1), 0), [0; 0]);
        assert_eq!(lengths(&event(1), 1_100), [500, 500, 100]);
        assert_eq!(lengths(&event(1_048_576), 10), [7, 3]);
    }

    #[test]
    fn two_aggregates_never_have_the_same_key() {
        assert_ne!(key_of("a:b", Some("c")), key_of("a", Some("b:c")));
        assert_eq!(key_of("a", None), None);
    }
}
