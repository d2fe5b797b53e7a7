use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::base64_bytes::Base64;

/// The most partitions of a cursor.
const MAX_PARTITIONS: usize = 10_000;

/// Records of a topic, as an operator looks at them.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TopicRecords {
    /// The records, in order per partition.
    pub items: Vec<TopicRecord>,
    /// The `from` of the next request.
    pub cursor: String,
}

/// One record of a topic. It has either a `value`, or an `error` and as a rule a `valueBase64`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TopicRecord {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: u32,
    /// The offset in the partition.
    pub offset: i64,
    /// The key.
    pub key: String,
    /// The id of the schema that the value names; null if it names none.
    pub schema_id: Option<i32>,
    /// The message as JSON, as [`readable`](crate::readable) writes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<Box<RawValue>>,
    /// The bytes of a value that cannot be decoded. Absent if they may contain sealed credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_base64: Option<Base64>,
    /// Why the value cannot be decoded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Where a read of a topic begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadFrom {
    /// At the earliest record that exists.
    Earliest,
    /// At the next record that is published.
    Latest,
    /// Where an earlier read has ended.
    Cursor(TopicCursor),
}

/// The next offset of each partition, as the text `0:17,1:4`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopicCursor(pub BTreeMap<u32, i64>);

/// The text names no place in a topic.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is none of earliest, latest and the cursor of a response")]
pub struct BadReadFrom;

impl fmt::Display for TopicCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (partition, offset)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{partition}:{offset}")?;
        }
        Ok(())
    }
}

impl FromStr for ReadFrom {
    type Err = BadReadFrom;

    fn from_str(text: &str) -> Result<Self, BadReadFrom> {
        match text {
            "earliest" => return Ok(Self::Earliest),
            "latest" => return Ok(Self::Latest),
            _ => {}
        }
        let mut places = BTreeMap::new();
        for place in text.split(',') {
            let (partition, offset) = place.split_once(':').ok_or(BadReadFrom)?;
            let (partition, offset) = (partition.parse().ok(), offset.parse().ok());
            places.insert(partition.ok_or(BadReadFrom)?, offset.ok_or(BadReadFrom)?);
            if places.len() > MAX_PARTITIONS {
                return Err(BadReadFrom);
            }
        }
        Ok(Self::Cursor(TopicCursor(places)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_as_it_was_shown() {
        let cursor = TopicCursor(BTreeMap::from([(0, 17), (12, 0)]));
        assert_eq!(cursor.to_string(), "0:17,12:0");
        assert_eq!(cursor.to_string().parse(), Ok(ReadFrom::Cursor(cursor)));
        assert_eq!("latest".parse(), Ok(ReadFrom::Latest));
        for text in ["", "0", "0:", ":1", "0:1,", "first", "-1:0", "0:x"] {
            assert_eq!(text.parse::<ReadFrom>(), Err(BadReadFrom), "{text}");
        }
    }
}
