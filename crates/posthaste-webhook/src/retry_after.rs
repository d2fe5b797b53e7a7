use std::time::{Duration, SystemTime};

/// The longest wait that a subscriber can ask for.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(3_600);

/// Reads a `Retry-After` value: seconds, or a date in one of the forms of RFC 9110.
///
/// Returns `None` for a wait that is over already, so that the caller's own backoff applies instead of an immediate
/// retry.
pub(crate) fn parse(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    let wait = if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // A number that overflows still means a long wait.
        value.parse().map_or(MAX_RETRY_AFTER, Duration::from_secs)
    } else {
        httpdate::parse_http_date(value).ok()?.duration_since(now).ok()?
    };
    (!wait.is_zero()).then(|| wait.min(MAX_RETRY_AFTER))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Sun, 06 Nov 1994 08:49:37 GMT, the example of RFC 9110.
    const NOW: Duration = Duration::from_secs(784_111_777);

    fn seconds(value: &str) -> Option<u64> {
        parse(value, SystemTime::UNIX_EPOCH + NOW).map(|wait| wait.as_secs())
    }

    #[test]
    fn seconds_and_dates_are_read_and_capped() {
        for (value, expected) in [
            ("1", Some(1)),
            (" 120 ", Some(120)),
            ("3600", Some(3_600)),
            ("3601", Some(3_600)),
            ("99999999999999999999999999", Some(3_600)),
            ("0", None),
            ("-1", None),
            ("1.5", None),
            ("+5", None),
            ("soon", None),
            ("", None),
            ("Sun, 06 Nov 1994 08:49:47 GMT", Some(10)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", None),
            ("Sun, 06 Nov 1994 08:00:00 GMT", None),
            ("Mon, 07 Nov 1994 08:49:37 GMT", Some(3_600)),
            ("Sunday, 06-Nov-94 08:49:47 GMT", Some(10)),
            ("Sun, 06 Nov 1994 08:49:47 CET", None),
            ("Sun, 31 Feb 1994 08:49:47 GMT", None),
        ] {
            assert_eq!(seconds(value), expected, "{value:?}");
        }
    }

    proptest! {
        #[test]
        fn no_value_panics_or_exceeds_the_cap(value in "\\PC{0,40}") {
            prop_assert!(seconds(&value).is_none_or(|wait| wait <= 3_600));
        }

        #[test]
        fn no_date_panics_or_exceeds_the_cap(
            day in 0..99u32, month in "[A-Z][a-z]{2}", year in 0..9999u32, hour in 0..99u32, minute in 0..99u32,
        ) {
            let value = format!("Sun, {day:02} {month} {year:04} {hour:02}:{minute:02}:00 GMT");
            prop_assert!(seconds(&value).is_none_or(|wait| wait <= 3_600));
        }
    }
}
