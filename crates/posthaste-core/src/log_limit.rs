use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How many keys are told apart; all others share one limit, so that the memory stays bounded.
const MAX_KEYS: usize = 1_000;

/// Keeps a failure that repeats itself from flooding the log: so many lines a second for each key, and with the next one
/// that is let through, how many were left out.
pub struct LogLimit {
    lines_a_second: u32,
    keys: Mutex<HashMap<String, Window>>,
}

struct Window {
    began: Instant,
    lines: u32,
    suppressed: u64,
}

impl LogLimit {
    /// At most so many lines a second for each key.
    pub fn new(lines_a_second: u32) -> Self {
        Self { lines_a_second, keys: Mutex::default() }
    }

    /// `Some` if a line may be written, with how many were left out since the last one.
    pub fn allows(&self, key: &str) -> Option<u64> {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        let key = if keys.contains_key(key) || keys.len() < MAX_KEYS { key } else { "" };
        let now = Instant::now();
        let window = keys.entry(key.to_owned()).or_insert(Window { began: now, lines: 0, suppressed: 0 });
        if now.duration_since(window.began) >= Duration::from_secs(1) {
            *window = Window { began: now, lines: 0, suppressed: window.suppressed };
        }
        if window.lines >= self.lines_a_second {
            window.suppressed += 1;
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn so_many_lines_a_second_for_each_key() {
        let limit = LogLimit::new(2);
        let lines = |key: &str, times: usize| (0..times).filter_map(|_| limit.allows(key)).collect::<Vec<_>>();
        assert_eq!(lines("a", 5), [0, 0]);
        assert_eq!(lines("b", 1), [0], "another key has lines of its own");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(lines("a", 3), [3, 0], "the next line tells how many were left out");
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_keys_is_bounded() {
        let limit = LogLimit::new(1);
        let lines = (0..5_000).filter(|key| limit.allows(&key.to_string()).is_some()).count();
        assert_eq!(lines, MAX_KEYS + 1);
    }
}
