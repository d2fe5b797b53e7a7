use std::time::Duration;

use chrono::{DateTime, NaiveDateTime, Utc};

use crate::outbox;

/// The database's clock when it received the statement, in UTC whatever the time zone of the session.
pub(super) const NOW: &str = "UTC_TIMESTAMP(6)";

/// The longest wait that is added to a clock: the table refuses times after the year 9999.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// A wait as microseconds, for an interval.
pub(super) fn micros(wait: Duration) -> i64 {
    wait.min(LONGEST).as_micros() as i64
}

/// A duration that the database returned in microseconds. A negative one becomes zero.
pub(super) fn span(micros: i64) -> Duration {
    Duration::from_micros(micros.max(0) as u64)
}

/// The nearest time that the table accepts. It has no time zone, so no session can convert it.
pub(super) fn storable(at: DateTime<Utc>) -> NaiveDateTime {
    outbox::storable(at, earliest()).naive_utc()
}

/// The earliest time that the table accepts.
pub(super) fn earliest() -> DateTime<Utc> {
    const FIRST_SECOND: i64 = -30_610_224_000;
    DateTime::from_timestamp(FIRST_SECOND, 0).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_accepts_the_years_1000_to_9999() {
        assert_eq!(storable(DateTime::<Utc>::MIN_UTC).to_string(), "1000-01-01 00:00:00");
        assert_eq!(storable(DateTime::<Utc>::MAX_UTC).to_string(), "9999-12-31 23:59:59.999999");
    }
}
