use std::collections::BTreeMap;
use std::fmt::Write;

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;

/// The offsets of one partition that a group is done with: everything below the watermark, and single ranges above it.
///
/// Acks come out of order. A commit carries both parts, so that one hanging record neither stops its partition nor
/// causes the records after it to be delivered again after a crash.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Progress {
    watermark: i64,
    /// Start of each range above the watermark → its end (exclusive). Ranges neither touch nor overlap.
    ranges: BTreeMap<i64, i64>,
}

/// The text is not one that [`Progress::encode`] writes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("progress {0:?} is not a list of acked ranges above its watermark")]
pub struct ProgressError(String);

impl Progress {
    /// Everything below this offset is done.
    pub fn at(watermark: i64) -> Self {
        Self { watermark, ranges: BTreeMap::new() }
    }

    /// The lowest offset that is not done.
    pub fn watermark(&self) -> i64 {
        self.watermark
    }

    /// True if this offset is done.
    pub fn is_done(&self, offset: i64) -> bool {
        offset < self.watermark || self.ranges.range(..=offset).next_back().is_some_and(|(_, end)| offset < *end)
    }

    /// Marks an offset as done. Doing it twice is harmless.
    pub fn complete(&mut self, offset: i64) {
        self.complete_range(offset, offset + 1);
    }

    /// Marks all offsets from `start` to before `end` as done. Doing it twice is harmless.
    pub fn complete_range(&mut self, start: i64, end: i64) {
        let (mut start, mut end) = (start.max(self.watermark), end);
        if start >= end {
            return;
        }
        // The ranges that touch or overlap it become one.
        if let Some((&before, &before_end)) = self.ranges.range(..start).next_back()
            && before_end >= start
        {
            (start, end) = (before, end.max(before_end));
        }
        while let Some((&after, &after_end)) = self.ranges.range(start..=end).next() {
            self.ranges.remove(&after);
            end = end.max(after_end);
        }
        if start == self.watermark {
            self.watermark = end;
        } else {
            self.ranges.insert(start, end);
        }
    }

    /// How many ranges there are above the watermark, which determines the length of the text.
    pub fn ranges(&self) -> usize {
        self.ranges.len()
    }

    /// The offsets done above the watermark, as text: pairs `distance+length` of the ranges, each from the end of the one
    /// before; or, where that is shorter, `=` and the bits of the offsets above the watermark in base64.
    ///
    /// Pairs are short when a few records hang, bits when every third one waits for the same endpoint.
    pub fn encode(&self) -> String {
        let above = self.ranges.last_key_value().map_or(0, |(_, end)| end - self.watermark - 1) as usize;
        let runs = self.encode_runs();
        // A few ranges stay readable for an operator who looks into the table.
        match self.ranges.len() > 16 && above.div_ceil(6) < runs.len() {
            true => self.encode_bits(above),
            false => runs,
        }
    }

    fn encode_runs(&self) -> String {
        let mut text = String::with_capacity(4 * self.ranges.len());
        let mut from = self.watermark;
        for (&start, &end) in &self.ranges {
            let space = if text.is_empty() { "" } else { " " };
            // Writing to a text cannot fail.
            let _ = write!(text, "{space}{}+{}", start - from, end - start);
            from = end;
        }
        text
    }

    fn encode_bits(&self, above: usize) -> String {
        let mut bits = vec![0_u8; above.div_ceil(8)];
        // The watermark itself is not done, so the first bit is the offset after it.
        let first = self.watermark + 1;
        for (&start, &end) in &self.ranges {
            for offset in (start - first) as usize..(end - first) as usize {
                bits[offset / 8] |= 1 << (offset % 8);
            }
        }
        format!("={}", STANDARD_NO_PAD.encode(bits))
    }

    /// Reads the text that [`encode`](Self::encode) wrote.
    pub fn decode(watermark: i64, text: &str) -> Result<Self, ProgressError> {
        let decoded = match text.strip_prefix('=') {
            Some(bits) => Self::decode_bits(watermark, bits),
            None => Self::decode_runs(watermark, text),
        };
        decoded.ok_or_else(|| ProgressError(text.chars().take(80).collect()))
    }

    fn decode_runs(watermark: i64, text: &str) -> Option<Self> {
        let mut progress = Self::at(watermark);
        let mut from = watermark;
        for pair in text.split_ascii_whitespace() {
            let (distance, length) = pair.split_once('+')?;
            let (distance, length): (u32, u32) = (distance.parse().ok()?, length.parse().ok()?);
            if distance == 0 || length == 0 {
                return None;
            }
            let start = from.checked_add(i64::from(distance))?;
            let end = start.checked_add(i64::from(length))?;
            progress.ranges.insert(start, end);
            from = end;
        }
        Some(progress)
    }

    fn decode_bits(watermark: i64, text: &str) -> Option<Self> {
        let bits = STANDARD_NO_PAD.decode(text).ok()?;
        let first = watermark.checked_add(1)?;
        // Bits beyond the largest offset are refused.
        first.checked_add(i64::try_from(bits.len()).ok()?.checked_mul(8)?)?;
        let mut progress = Self::at(watermark);
        let is_set = |offset: usize| bits[offset / 8] & (1 << (offset % 8)) != 0;
        let mut start = None;
        for offset in 0..=8 * bits.len() {
            match (offset < 8 * bits.len() && is_set(offset), start) {
                (true, None) => start = Some(offset),
                (false, Some(from)) => {
                    progress.ranges.insert(first + from as i64, first + offset as i64);
                    start = None;
                }
                _ => {}
            }
        }
        Some(progress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn acks_out_of_order_become_runs_and_then_raise_the_watermark() {
        let mut progress = Progress::at(5);
        progress.complete(7);
        progress.complete(9);
        assert_eq!((progress.watermark(), progress.encode().as_str()), (5, "2+1 1+1"));
        progress.complete(8);
        assert_eq!(progress.encode(), "2+3");
        progress.complete(5);
        progress.complete(6);
        assert_eq!((progress.watermark(), progress.ranges()), (10, 0));
    }

    #[test]
    fn ten_thousand_gaps_have_a_short_text() {
        let mut progress = Progress::at(100);
        (0..30_000).filter(|offset| offset % 3 != 0).for_each(|offset| progress.complete(100 + offset));
        let text = progress.encode();
        assert!(text.len() < 5_100, "{} bytes for ten thousand gaps", text.len());
        assert_eq!(Progress::decode(100, &text).unwrap(), progress);
    }

    #[test]
    fn malformed_text_is_refused() {
        for text in ["x", "1", "1+", "+1", "0+1", "1+0", "-1+1", "1+1 junk", "99999999999+1", "=*", "=A"] {
            assert!(Progress::decode(0, text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_set_of_offsets(
            ranges in proptest::collection::vec((0i64..200, prop_oneof![Just(1i64), 0i64..20]), 0..300)
        ) {
            let mut progress = Progress::at(0);
            let mut set = BTreeSet::new();
            for (start, length) in ranges {
                progress.complete_range(start, start + length);
                set.extend(start..start + length);
                let watermark = (0..).find(|offset| !set.contains(offset)).unwrap();
                prop_assert_eq!(progress.watermark(), watermark);
            }
            for offset in 0..200 {
                prop_assert_eq!(progress.is_done(offset), set.contains(&offset));
            }
            let read = Progress::decode(progress.watermark(), &progress.encode()).unwrap();
            prop_assert_eq!(read, progress);
        }

        #[test]
        fn decoding_never_panics(watermark: i64, text in "\\PC{0,40}") {
            let _ = Progress::decode(watermark, &text);
        }
    }
}
