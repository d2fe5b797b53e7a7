use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

/// Work that waited for a part of the hub at one check.
#[derive(Clone, Debug)]
pub(crate) struct WaitingWork {
    /// The part that has to do it.
    pub(crate) part: String,
    /// The kind of work, if the part has several kinds.
    pub(crate) work: String,
    /// Changes whenever the part makes progress with this work.
    pub(crate) progress: String,
    /// How long the part may make no progress.
    pub(crate) stall_timeout: Duration,
}

/// Finds parts that make no progress while work waits, by comparing several checks.
///
/// Checks may be far apart: if the progress is the same in two checks, the part made no progress in between.
#[derive(Default)]
pub(crate) struct StallDetector {
    seen: HashMap<(String, String), Seen>,
}

struct Seen {
    progress: String,
    since: Instant,
}

impl StallDetector {
    /// Compares this check with the earlier ones. Returns each part that is stalled, with the reason.
    pub(crate) fn observe(&mut self, now: Instant, waiting: Vec<WaitingWork>) -> Vec<(String, String)> {
        let mut seen = HashMap::with_capacity(waiting.len());
        let mut stalled = Vec::new();
        for WaitingWork { part, work, progress, stall_timeout } in waiting {
            let key = (part, work);
            let before = self.seen.remove(&key).filter(|before| before.progress == progress);
            let since = before.map_or(now, |before| before.since);
            if now - since > stall_timeout {
                let (part, work) = &key;
                let detail = format!("no progress for {} s while work waits: {work}", (now - since).as_secs());
                stalled.push((part.clone(), detail));
            }
            seen.insert(key, Seen { progress, since });
        }
        self.seen = seen;
        stalled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STALL_TIMEOUT: Duration = Duration::from_secs(30);

    fn waiting(part: &str, progress: u32) -> WaitingWork {
        let (part, work) = (part.to_owned(), "topic".to_owned());
        WaitingWork { part, work, progress: progress.to_string(), stall_timeout: STALL_TIMEOUT }
    }

    #[tokio::test(start_paused = true)]
    async fn a_part_is_stalled_when_its_work_waits_without_progress() {
        let (mut stalls, start) = (StallDetector::default(), Instant::now());
        let later = start + STALL_TIMEOUT + Duration::from_secs(1);
        assert!(stalls.observe(start, vec![waiting("a", 1), waiting("b", 1), waiting("c", 1)]).is_empty());
        // "a" is stalled, "b" made progress, "c" has no work left.
        let stalled = stalls.observe(later, vec![waiting("a", 1), waiting("b", 2)]);
        assert_eq!(stalled, [("a".to_owned(), "no progress for 31 s while work waits: topic".to_owned())]);
        // New work gets the full timeout.
        assert!(stalls.observe(later, vec![waiting("c", 1)]).is_empty());
    }
}
