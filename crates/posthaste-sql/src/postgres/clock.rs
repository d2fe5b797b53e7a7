use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::outbox;

/// The database's clock when it received the statement. Not `clock_timestamp()`: that may change while the statement
/// runs, so no index can be searched with it. Not `now()`: that is the beginning of the transaction.
pub(super) const NOW: &str = "statement_timestamp()";

/// The longest wait that is added to a clock: the table refuses times after the year 9999.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// A wait as microseconds, to be multiplied with an interval.
pub(super) fn micros(wait: Duration) -> i64 {
    wait.min(LONGEST).as_micros() as i64
}

/// A duration that the database returned in microseconds. A negative one becomes zero.
pub(super) fn span(micros: i64) -> Duration {
    Duration::from_micros(micros.max(0) as u64)
}

/// The nearest time that the table accepts.
pub(super) fn storable(at: DateTime<Utc>) -> DateTime<Utc> {
    outbox::storable(at, earliest())
}

/// The earliest time that the table accepts.
pub(super) fn earliest() -> DateTime<Utc> {
    const FIRST_SECOND: i64 = -62_135_596_800;
    DateTime::from_timestamp(FIRST_SECOND, 0).unwrap_or_default()
}
