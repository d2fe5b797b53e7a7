use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::lock;

/// How many keys have a limit of their own. All others share one, so that memory stays bounded.
const MAX_KEYS: usize = 4_096;

/// Keeps a repeated failure from flooding the log: each key may write a limited number of lines per window. The next
/// line after that says how many were suppressed.
pub struct LogLimit {
    lines: u32,
    window: Duration,
    keys: Mutex<HashMap<String, Window>>,
}

struct Window {
    began: Instant,
    lines: u32,
    suppressed: u64,
}

impl LogLimit {
    /// At most `lines` lines for each key in each `window`.
    pub fn new(lines: u32, window: Duration) -> Self {
        Self { lines, window, keys: Mutex::default() }
    }

    /// `Some` if a line may be written, with the number of lines suppressed since the last one.
    pub fn allows(&self, key: &str) -> Option<u64> {
        let mut keys = lock(&self.keys);
        let now = Instant::now();
        if keys.len() >= MAX_KEYS && !keys.contains_key(key) {
            keys.retain(|_, of_key| now.duration_since(of_key.began) < self.window);
        }
        let key = if keys.len() >= MAX_KEYS && !keys.contains_key(key) { "" } else { key };
        let of_key = keys.entry(key.to_owned()).or_insert(Window { began: now, lines: 0, suppressed: 0 });
        if now.duration_since(of_key.began) >= self.window {
            (of_key.began, of_key.lines) = (now, 0);
        }
        if of_key.lines >= self.lines {
            of_key.suppressed += 1;
            return None;
        }
        of_key.lines += 1;
        Some(std::mem::take(&mut of_key.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_key_may_write_a_limited_number_of_lines_per_window() {
        let limit = LogLimit::new(2, Duration::from_secs(1));
        let lines = |key: &str, times: usize| (0..times).filter_map(|_| limit.allows(key)).collect::<Vec<_>>();
        assert_eq!(lines("a", 5), [0, 0]);
        assert_eq!(lines("b", 1), [0], "another key has lines of its own");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(lines("a", 3), [3, 0], "the next line says how many were suppressed");
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_keys_is_bounded() {
        let limit = LogLimit::new(1, Duration::from_secs(1));
        let lines = (0..10_000).filter(|key| limit.allows(&key.to_string()).is_some()).count();
        assert_eq!(lines, MAX_KEYS + 1, "all other keys share one limit");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(limit.allows("late"), Some(0), "keys whose window is over make room");
    }
}
