use std::time::Duration;

use chrono::{DateTime, Timelike, Utc};

/// The database's clock in milliseconds. Rounded: a double just below the whole number must not lose one.
pub(super) const NOW_MS: &str = "CAST(round(unixepoch('subsec') * 1000) AS INTEGER)";
/// The database's clock as RFC 3339 text.
pub(super) const NOW_TEXT: &str = "strftime('%Y-%m-%dT%H:%M:%fZ', 'now')";

/// The time in a column in milliseconds since 1970, as SQL; NULL if the column holds no time.
///
/// The column may hold any text with a date that SQLite reads (RFC 3339, `YYYY-MM-DD HH:MM:SS` and its shorter forms),
/// or a number. A number is read as SQLite's modifier `auto` reads it: up to 5373484.5 it is a Julian day, above that
/// it is Unix seconds. SQLite before 3.38 does not know `auto` itself, and other programs may use such a version. A
/// time without a date is not accepted: SQLite would read it as a time of the year 2000.
///
/// The generated column `due` and the checks of the outbox table use the same expression.
macro_rules! millis_sql {
    ($column:literal) => {
        concat!(
            "CAST(round(CASE WHEN ",
            $column,
            " GLOB '[0-9][0-9][0-9][0-9]-*' THEN (julianday(",
            $column,
            ") - 2440587.5) * 86400000 WHEN ",
            $column,
            " GLOB '*[^0-9.]*' THEN NULL WHEN CAST(",
            $column,
            " AS REAL) < 5373485 THEN (CAST(",
            $column,
            " AS REAL) - 2440587.5) * 86400000 ELSE CAST(",
            $column,
            " AS REAL) * 1000 END) AS INTEGER)"
        )
    };
}
pub(super) use millis_sql;

/// [`millis_sql!`] of a column that is known at run time.
pub(super) fn millis_of(column: &str) -> String {
    millis_sql!("{column}").replace("{column}", column)
}

/// The nearest time whose text SQLite and we can read: SQLite rounds to milliseconds, knows no year 10000 and no leap
/// second.
pub(super) fn storable(at: DateTime<Utc>) -> DateTime<Utc> {
    const FIRST_SECOND: i64 = -62_135_596_800;
    const LAST_MILLIS: i64 = 253_402_300_799_999;
    let (first, last) = (DateTime::from_timestamp(FIRST_SECOND, 0), DateTime::from_timestamp_millis(LAST_MILLIS));
    let at = at.clamp(first.unwrap_or_default(), last.unwrap_or(DateTime::<Utc>::MAX_UTC));
    at.with_nanosecond(at.nanosecond().min(999_999_999)).unwrap_or(at)
}

/// The longest wait that is added to a clock: SQLite has no times after the year 9999.
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

/// A duration that the database returned in milliseconds. A negative one becomes zero.
pub(super) fn span(millis: i64) -> Duration {
    Duration::from_millis(millis.max(0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The SQL with one space between words, so that line breaks do not matter.
    fn words(sql: &str) -> String {
        sql.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_table_and_the_claims_read_times_in_the_same_way() {
        let table = words(include_str!("../../migrations/sqlite/outbox/0001_outbox.up.sql"));
        for column in ["available_at", "created_at", "occurred_at"] {
            assert!(table.contains(&words(&millis_of(column))), "{column}");
        }
    }

    #[test]
    fn a_time_that_sqlite_could_not_read_becomes_the_nearest_that_it_can() {
        let text = |at: DateTime<Utc>| storable(at).to_rfc3339();
        assert_eq!(text(DateTime::<Utc>::MIN_UTC), "0001-01-01T00:00:00+00:00");
        assert_eq!(text(DateTime::<Utc>::MAX_UTC), "9999-12-31T23:59:59.999+00:00");
        assert_eq!(text("2016-12-31T23:59:60.5Z".parse().unwrap()), "2016-12-31T23:59:59.999999999+00:00");
    }
}
