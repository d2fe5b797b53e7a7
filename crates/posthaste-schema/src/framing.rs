//! Confluent's wire format: a magic byte, the id of the schema, the position of the message in it, and the message.

use std::ops::Deref;

use bytes::{BufMut, Bytes, BytesMut};

/// The first byte of every framed value.
const MAGIC: u8 = 0;
/// The magic byte and the schema id.
const HEADER: usize = 5;
/// The most message indexes that a frame may have: how deeply messages are nested in each other.
pub const MAX_INDEXES: usize = 16;
/// The most bytes of a varint of 32 bits.
const MAX_VARINT: usize = 5;

/// A value in Confluent's wire format, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The schema that the message was written with.
    pub schema_id: i32,
    /// The position of the message in its schema.
    pub indexes: Indexes,
    /// The message. It shares the memory of the value.
    pub message: Bytes,
}

/// The position of a message in its schema: the index of a message of the file, then of a message nested in it, and so
/// on. It is never empty.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Indexes {
    count: u8,
    values: [i32; MAX_INDEXES],
}

/// Why a value is not a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// There is nothing.
    #[error("the value is empty")]
    Empty,
    /// The value does not begin with the magic byte.
    #[error("the value is not framed: its first byte is {found} and not 0")]
    NotFramed {
        /// The first byte.
        found: u8,
    },
    /// The value ends within the schema id.
    #[error("the value ends within its schema id: it has {length} bytes")]
    TruncatedId {
        /// The length of the value.
        length: usize,
    },
    /// The value ends within the message indexes.
    #[error("the value ends within its message indexes")]
    TruncatedIndexes,
    /// A message index does not fit 32 bits.
    #[error("a message index has more than 32 bits")]
    LongVarint,
    /// The number of message indexes, or one of them, is negative.
    #[error("a message index or their number is {found}")]
    NegativeIndex {
        /// The number.
        found: i32,
    },
    /// There are more message indexes than [`MAX_INDEXES`].
    #[error("there are {count} message indexes, more than {MAX_INDEXES}")]
    TooManyIndexes {
        /// How many the frame says there are.
        count: i32,
    },
}

impl Indexes {
    /// `None` for no index, too many, or a negative one.
    pub fn new(indexes: &[i32]) -> Option<Self> {
        if indexes.is_empty() || indexes.len() > MAX_INDEXES || indexes.iter().any(|index| *index < 0) {
            return None;
        }
        let mut values = [0; MAX_INDEXES];
        values[..indexes.len()].copy_from_slice(indexes);
        Some(Self { count: indexes.len() as u8, values })
    }
}

impl Deref for Indexes {
    type Target = [i32];

    fn deref(&self) -> &[i32] {
        &self.values[..usize::from(self.count)]
    }
}

impl std::fmt::Debug for Indexes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Writes a message in Confluent's wire format.
pub fn encode(schema_id: i32, indexes: &Indexes, message: &[u8]) -> Bytes {
    let mut value = BytesMut::with_capacity(HEADER + (1 + indexes.len()) * MAX_VARINT + message.len());
    value.put_u8(MAGIC);
    value.put_i32(schema_id);
    if **indexes == [0] {
        // The usual case has a short form.
        value.put_u8(0);
    } else {
        put_varint(&mut value, indexes.len() as i32);
        for index in indexes.iter() {
            put_varint(&mut value, *index);
        }
    }
    value.put_slice(message);
    value.freeze()
}

/// Takes a value in Confluent's wire format apart. It allocates nothing.
pub fn decode(value: &Bytes) -> Result<Frame, FrameError> {
    match value.first() {
        None => return Err(FrameError::Empty),
        Some(&MAGIC) => {}
        Some(&found) => return Err(FrameError::NotFramed { found }),
    }
    let Some(id) = value.get(1..HEADER).and_then(|id| id.try_into().ok()) else {
        return Err(FrameError::TruncatedId { length: value.len() });
    };
    let mut rest = Varints { bytes: value, at: HEADER };
    let indexes = rest.indexes()?;
    Ok(Frame { schema_id: i32::from_be_bytes(id), indexes, message: value.slice(rest.at..) })
}

/// Reads varints.
struct Varints<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Varints<'_> {
    fn indexes(&mut self) -> Result<Indexes, FrameError> {
        let count = self.natural()?;
        if count as usize > MAX_INDEXES {
            return Err(FrameError::TooManyIndexes { count });
        }
        let mut indexes = Indexes { count: count.max(1) as u8, values: [0; MAX_INDEXES] };
        for index in &mut indexes.values[..count as usize] {
            *index = self.natural()?;
        }
        Ok(indexes)
    }

    /// A number that is not negative.
    fn natural(&mut self) -> Result<i32, FrameError> {
        match self.zigzag()? {
            found if found < 0 => Err(FrameError::NegativeIndex { found }),
            number => Ok(number),
        }
    }

    fn zigzag(&mut self) -> Result<i32, FrameError> {
        let mut number: u64 = 0;
        for place in 0..MAX_VARINT {
            let byte = *self.bytes.get(self.at).ok_or(FrameError::TruncatedIndexes)?;
            self.at += 1;
            number |= u64::from(byte & 0x7f) << (7 * place);
            if byte & 0x80 == 0 {
                let number = u32::try_from(number).map_err(|_| FrameError::LongVarint)?;
                return Ok((number >> 1) as i32 ^ -((number & 1) as i32));
            }
        }
        Err(FrameError::LongVarint)
    }
}

fn put_varint(value: &mut BytesMut, number: i32) {
    let mut rest = ((number << 1) ^ (number >> 31)) as u32;
    while rest >= 0x80 {
        value.put_u8(rest as u8 | 0x80);
        rest >>= 7;
    }
    value.put_u8(rest as u8);
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn indexes(indexes: &[i32]) -> Indexes {
        Indexes::new(indexes).unwrap()
    }

    fn frame(bytes: &[u8]) -> Result<Frame, FrameError> {
        decode(&Bytes::copy_from_slice(bytes))
    }

    /// Schema id, indexes and message, and how they are written.
    type Golden = (i32, &'static [i32], &'static [u8], &'static [u8]);

    /// What Confluent's own serializers write.
    #[test]
    fn golden_frames() {
        let golden: [Golden; 8] = [
            (1, &[0], b"m", &[0, 0, 0, 0, 1, 0, b'm']),
            (0x0102_0304, &[0], b"", &[0, 1, 2, 3, 4, 0]),
            (i32::MAX, &[0], b"\x00", &[0, 0x7f, 0xff, 0xff, 0xff, 0, 0]),
            (7, &[1], b"m", &[0, 0, 0, 0, 7, 2, 2, b'm']),
            (7, &[1, 0], b"m", &[0, 0, 0, 0, 7, 4, 2, 0, b'm']),
            (7, &[2, 1, 3], b"m", &[0, 0, 0, 0, 7, 6, 4, 2, 6, b'm']),
            (7, &[64, 8192], b"m", &[0, 0, 0, 0, 7, 4, 0x80, 1, 0x80, 0x80, 1, b'm']),
            (7, &[i32::MAX], b"m", &[0, 0, 0, 0, 7, 2, 0xfe, 0xff, 0xff, 0xff, 0x0f, b'm']),
        ];
        for (schema_id, path, message, bytes) in golden {
            assert_eq!(encode(schema_id, &indexes(path), message), bytes, "{path:?}");
            let message = Bytes::copy_from_slice(message);
            assert_eq!(frame(bytes), Ok(Frame { schema_id, indexes: indexes(path), message }), "{path:?}");
        }
    }

    #[test]
    fn the_long_form_of_the_first_message_is_read() {
        let long = frame(&[0, 0, 0, 0, 7, 2, 0, b'm']).unwrap();
        assert_eq!(long, frame(&[0, 0, 0, 0, 7, 0, b'm']).unwrap());
        assert_eq!((&long.indexes[..], &long.message[..]), (&[0][..], &b"m"[..]));
    }

    #[test]
    fn the_message_is_not_copied() {
        let value = encode(7, &indexes(&[0]), b"message");
        let message = decode(&value).unwrap().message;
        assert_eq!(message.as_ptr(), value[HEADER + 1..].as_ptr());
    }

    #[test]
    fn bad_frames_are_named() {
        let bad: [(&[u8], FrameError); 14] = [
            (&[], FrameError::Empty),
            (b"{}", FrameError::NotFramed { found: b'{' }),
            (&[1, 0, 0, 0, 1, 0], FrameError::NotFramed { found: 1 }),
            (&[0], FrameError::TruncatedId { length: 1 }),
            (&[0, 0, 0, 1], FrameError::TruncatedId { length: 4 }),
            (&[0, 0, 0, 0, 1], FrameError::TruncatedIndexes),
            (&[0, 0, 0, 0, 1, 0x80], FrameError::TruncatedIndexes),
            (&[0, 0, 0, 0, 1, 4, 0], FrameError::TruncatedIndexes),
            (&[0, 0, 0, 0, 1, 0x80, 0x80, 0x80, 0x80, 0x80, 1], FrameError::LongVarint),
            (&[0, 0, 0, 0, 1, 2, 0xff, 0xff, 0xff, 0xff, 0x1f], FrameError::LongVarint),
            (&[0, 0, 0, 0, 1, 1], FrameError::NegativeIndex { found: -1 }),
            (&[0, 0, 0, 0, 1, 2, 3], FrameError::NegativeIndex { found: -2 }),
            (&[0, 0, 0, 0, 1, 34], FrameError::TooManyIndexes { count: 17 }),
            (&[0, 0, 0, 0, 1, 0xfe, 0xff, 0xff, 0xff, 0x0f], FrameError::TooManyIndexes { count: i32::MAX }),
        ];
        for (bytes, error) in bad {
            assert_eq!(frame(bytes), Err(error), "{bytes:?}");
        }
        assert!(Indexes::new(&[]).is_none() && Indexes::new(&[-1]).is_none() && Indexes::new(&[0; 17]).is_none());
    }

    fn a_path() -> impl Strategy<Value = Vec<i32>> {
        vec(0..=i32::MAX, 1..=MAX_INDEXES)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]

        #[test]
        fn what_is_encoded_is_decoded(schema_id: i32, path in a_path(), message in vec(any::<u8>(), 0..64)) {
            let value = encode(schema_id, &indexes(&path), &message);
            let frame = decode(&value).unwrap();
            prop_assert_eq!((frame.schema_id, &frame.indexes[..]), (schema_id, &path[..]));
            prop_assert_eq!(&frame.message[..], &message[..]);
        }

        #[test]
        fn no_bytes_make_the_decoder_panic(bytes in vec(any::<u8>(), 0..64)) {
            check(&bytes);
        }

        /// Nearly valid frames reach further than random bytes do.
        #[test]
        fn no_damaged_frame_makes_the_decoder_panic(
            schema_id: i32,
            path in a_path(),
            damage in vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = encode(schema_id, &indexes(&path), b"message").to_vec();
            for (at, byte) in damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            bytes.truncate(cut.index(bytes.len() + 1));
            check(&bytes);
        }
    }

    /// The same check as the fuzz target: a frame that can be read means the same when it is written again.
    fn check(bytes: &[u8]) {
        if let Ok(read) = frame(bytes) {
            assert_eq!(decode(&encode(read.schema_id, &read.indexes, &read.message)), Ok(read));
        }
    }
}
