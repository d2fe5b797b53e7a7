//! Values that stand as text in the configuration, with messages that say how to write them.

/// Durations such as `500ms`.
pub(super) mod duration {
    use std::time::Duration;

    use posthaste_api::{format_duration, parse_duration};
    use serde::{Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_duration(*duration))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let text = deserializer.deserialize_str(super::Text(r#"a duration as text, such as "500ms", "5s" or "2m""#))?;
        parse_duration(&text).map_err(|error| D::Error::custom(format!("{text:?} is {error}")))
    }
}

/// Socket addresses such as `127.0.0.1:8080`.
pub(super) mod address {
    use std::net::SocketAddr;

    use serde::{Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(address: &SocketAddr, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(address)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
        let text = deserializer.deserialize_str(super::Text("an address as text, such as \"127.0.0.1:8080\""))?;
        let wrong = |_| D::Error::custom(format!("{text:?} is not an IP address with a port, such as 127.0.0.1:8080"));
        text.parse().map_err(wrong)
    }
}

struct Text(&'static str);

impl serde::de::Visitor<'_> for Text {
    type Value = String;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }
}
