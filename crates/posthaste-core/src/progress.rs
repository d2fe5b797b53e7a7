use std::collections::BTreeMap;

/// How far a group has come in one partition: everything below the watermark, and single runs above it.
///
/// Acks come out of order; a commit carries both parts, so that one hanging record neither stops its partition nor
/// causes the ones after it to be delivered again after a crash.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Progress {
    watermark: i64,
    /// Start of each run above the watermark → its end (exclusive). Runs neither touch nor overlap.
    runs: BTreeMap<i64, i64>,
}

/// The text is not one that [`Progress::encode`] writes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("progress {0:?} is not a list of runs above its watermark")]
pub struct ProgressError(String);

impl Progress {
    pub fn at(watermark: i64) -> Self {
        Self { watermark, runs: BTreeMap::new() }
    }

    /// The lowest offset that is not done.
    pub fn watermark(&self) -> i64 {
        self.watermark
    }

    pub fn is_done(&self, offset: i64) -> bool {
        offset < self.watermark || self.runs.range(..=offset).next_back().is_some_and(|(_, end)| offset < *end)
    }

    /// Marks an offset as done; again is harmless.
    pub fn complete(&mut self, offset: i64) {
        if self.is_done(offset) {
            return;
        }
        let mut start = offset;
        let mut end = offset + 1;
        if let Some((&before, &before_end)) = self.runs.range(..offset).next_back()
            && before_end == offset
        {
            start = before;
        }
        if let Some(after_end) = self.runs.remove(&end) {
            end = after_end;
        }
        if start == self.watermark {
            self.watermark = end;
        } else {
            self.runs.insert(start, end);
        }
    }

    /// How many runs stand above the watermark: what its text costs.
    pub fn runs(&self) -> usize {
        self.runs.len()
    }

    /// The runs as `distance+length` pairs from the watermark on, each from the end of the one before.
    pub fn encode(&self) -> String {
        let mut text = String::new();
        let mut from = self.watermark;
        for (&start, &end) in &self.runs {
            if !text.is_empty() {
                text.push(' ');
            }
            text.push_str(&format!("{}+{}", start - from, end - start));
            from = end;
        }
        text
    }

    pub fn decode(watermark: i64, text: &str) -> Result<Self, ProgressError> {
        let bad = || ProgressError(text.chars().take(80).collect());
        let mut progress = Self::at(watermark);
        let mut from = watermark;
        for pair in text.split_ascii_whitespace() {
            let (distance, length) = pair.split_once('+').ok_or_else(bad)?;
            let distance: u32 = distance.parse().map_err(|_| bad())?;
            let length: u32 = length.parse().map_err(|_| bad())?;
            if distance == 0 || length == 0 {
                return Err(bad());
            }
            let start = from.checked_add(i64::from(distance)).ok_or_else(bad)?;
            let end = start.checked_add(i64::from(length)).ok_or_else(bad)?;
            progress.runs.insert(start, end);
            from = end;
        }
        Ok(progress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn acks_out_of_order_close_up() {
        let mut progress = Progress::at(5);
        progress.complete(7);
        progress.complete(9);
        assert_eq!((progress.watermark(), progress.encode().as_str()), (5, "2+1 1+1"));
        progress.complete(8);
        assert_eq!(progress.encode(), "2+3");
        progress.complete(5);
        progress.complete(6);
        assert_eq!((progress.watermark(), progress.runs()), (10, 0));
    }

    #[test]
    fn text_that_is_not_ours_is_refused() {
        for text in ["x", "1", "1+", "+1", "0+1", "1+0", "-1+1", "1+1 junk", "99999999999+1"] {
            assert!(Progress::decode(0, text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn it_says_what_a_set_would_say(offsets in proptest::collection::vec(0i64..200, 0..300)) {
            let mut progress = Progress::at(0);
            let mut set = BTreeSet::new();
            for offset in offsets {
                progress.complete(offset);
                set.insert(offset);
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
