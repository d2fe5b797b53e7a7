//! The Protobuf messages of the bus and of the gRPC services, generated from the files in `proto/posthaste/v1`.

use std::time::Duration;

use chrono::{DateTime, Utc};

include!(concat!(env!("OUT_DIR"), "/posthaste.v1.rs"));

/// A time as Protobuf writes it.
pub fn timestamp(time: DateTime<Utc>) -> prost_types::Timestamp {
    // Chrono writes a leap second as more than a second of nanoseconds, which Protobuf does not allow.
    let nanos = time.timestamp_subsec_nanos().min(999_999_999);
    prost_types::Timestamp { seconds: time.timestamp(), nanos: nanos as i32 }
}

/// Reads a time as Protobuf writes it; `None` if it is out of range.
pub fn datetime(timestamp: &prost_types::Timestamp) -> Option<DateTime<Utc>> {
    DateTime::from_timestamp(timestamp.seconds, u32::try_from(timestamp.nanos).ok()?)
}

/// A duration as Protobuf writes it; a longer one than Protobuf allows becomes the longest.
pub fn duration(duration: Duration) -> prost_types::Duration {
    let longest = prost_types::Duration { seconds: 315_576_000_000, nanos: 0 };
    prost_types::Duration::try_from(duration).unwrap_or(longest)
}

impl From<(String, String)> for Header {
    fn from((name, value): (String, String)) -> Self {
        Self { name, value }
    }
}

impl From<Header> for (String, String) {
    fn from(header: Header) -> Self {
        (header.name, header.value)
    }
}
