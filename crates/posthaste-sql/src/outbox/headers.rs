use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serializer};

/// Headers as a JSON object, in the order in which the writer gave them.
pub(crate) fn write_headers(headers: &[(String, String)]) -> Option<String> {
    if headers.is_empty() {
        return None;
    }
    let mut json = Vec::new();
    let written = serde_json::Serializer::new(&mut json).collect_map(headers.iter().map(|(name, value)| (name, value)));
    debug_assert!(written.is_ok(), "texts always become JSON");
    String::from_utf8(json).ok()
}

/// Reads headers that any program may have written. The error says what is wrong with them.
pub(crate) fn read_headers(json: Option<&str>) -> Result<Vec<(String, String)>, String> {
    let Some(json) = json.filter(|json| !json.trim().is_empty()) else { return Ok(Vec::new()) };
    let headers: Option<Headers> = serde_json::from_str(json)
        .map_err(|error| format!("headers are not a JSON object whose values are texts: {error}"))?;
    Ok(headers.map(|headers| headers.0).unwrap_or_default())
}

/// Keeps the order of the headers and repeated names. A header whose value is null is left out.
struct Headers(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Headers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Headers;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of texts")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Headers, A::Error> {
                let mut entries = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, Option<String>>()? {
                    entries.extend(value.map(|value| (name, value)));
                }
                Ok(Headers(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
