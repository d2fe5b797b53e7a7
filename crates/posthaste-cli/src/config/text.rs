//! Values that the configuration writes as text. The error messages say how to write them.

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

/// Ranges of IP addresses such as `10.0.0.0/8`.
pub(super) mod ranges {
    use posthaste_webhook::Cidr;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(ranges: &[Cidr], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(ranges.iter().map(Cidr::to_string))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Cidr>, D::Error> {
        let texts = Vec::<String>::deserialize(deserializer)?;
        texts.iter().map(|text| text.parse().map_err(D::Error::custom)).collect()
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
