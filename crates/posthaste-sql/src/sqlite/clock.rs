use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::outbox;

/// The database's clock in milliseconds. Rounded: a double just below the whole number must not lose one.
pub(super) const NOW_MS: &str = "CAST(round(unixepoch('subsec') * 1000) AS INTEGER)";
/// The database's clock as RFC 3339 text.
pub(super) const NOW_TEXT: &str = "strftime('%Y-%m-%dT%H:%M:%fZ', 'now')";

/// The time in a column of RFC 3339 text, or of any other that SQLite reads, in milliseconds; NULL where it is none.
pub(super) fn millis_of(column: &str) -> String {
    format!("CAST(round((julianday({column}) - 2440587.5) * 86400000) AS INTEGER)")
}

/// The nearest time whose text SQLite and we can read.
pub(super) fn storable(at: DateTime<Utc>) -> DateTime<Utc> {
    const FIRST_SECOND: i64 = -62_135_596_800;
    outbox::storable(at, DateTime::from_timestamp(FIRST_SECOND, 0).unwrap_or_default())
}

/// The longest wait that is added to a clock: beyond the year 9999 SQLite knows no time.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// A wait as milliseconds, to be added to [`NOW_MS`].
pub(super) fn millis(wait: Duration) -> i64 {
    wait.min(LONGEST).as_millis() as i64
}

/// A wait as a modifier of SQLite's time functions.
pub(super) fn modifier(wait: Duration) -> String {
    let wait = wait.min(LONGEST);
    format!("+{}.{:03} seconds", wait.as_secs(), wait.subsec_millis())
}

/// A time that the database keeps as milliseconds.
pub(super) fn time(millis: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_millis(millis).unwrap_or_default()
}

/// A span that the database answered in milliseconds; what is past is no wait at all.
pub(super) fn span(millis: i64) -> Duration {
    Duration::from_millis(millis.max(0) as u64)
}
