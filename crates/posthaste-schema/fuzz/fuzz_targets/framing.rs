#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use posthaste_schema::framing::{decode, encode};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(frame) = decode(&Bytes::copy_from_slice(bytes)) {
        let again = encode(frame.schema_id, &frame.indexes, &frame.message);
        assert_eq!(decode(&again), Ok(frame));
    }
});
