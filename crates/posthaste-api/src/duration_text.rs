//! Durations as text such as `500ms`, for configuration files: `#[serde(with = "posthaste_api::duration_text")]`.

use std::fmt;
use std::time::Duration;

use serde::de::{Error, Visitor};
use serde::{Deserializer, Serializer};

use crate::duration::{format_duration, parse_duration};

/// Writes a duration as [`parse_duration`] reads it.
pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_duration(*duration))
}

/// Reads a duration. An error explains how to write one.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    struct Text;

    impl Visitor<'_> for Text {
        type Value = Duration;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(r#"a duration as text, such as "500ms", "5s" or "2m""#)
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<Duration, E> {
            parse_duration(text).map_err(|error| E::custom(format!("{text:?} is {error}")))
        }
    }

    deserializer.deserialize_str(Text)
}

/// Optional durations: `#[serde(with = "posthaste_api::duration_text::option")]`, with a default.
pub mod option {
    use std::time::Duration;

    use serde::{Deserializer, Serializer};

    /// Writes a duration, or nothing.
    pub fn serialize<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        match duration {
            Some(duration) => super::serialize(duration, serializer),
            None => serializer.serialize_none(),
        }
    }

    /// Reads a duration that is there.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        super::deserialize(deserializer).map(Some)
    }
}
