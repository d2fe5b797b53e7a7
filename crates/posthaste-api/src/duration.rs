use std::time::Duration;

/// A text that is not a duration.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("not a duration: write a number with its unit, such as 500ms, 5s or 2m")]
pub struct DurationError(#[source] humantime::DurationError);

/// Reads a duration as people write it: `500ms`, `5s`, `1h 30m`.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    humantime::parse_duration(text).map_err(DurationError)
}

/// Writes a duration as [`parse_duration`] reads it.
pub fn format_duration(duration: Duration) -> String {
    humantime::format_duration(duration).to_string()
}
