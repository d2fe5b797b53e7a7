use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

/// Work that waits for a part of the hub, as one check saw it.
#[derive(Clone, Debug)]
pub(crate) struct WaitingWork {
    /// The part that has to do it.
    pub(crate) part: String,
    /// Which work that is, where the part has several kinds of it.
    pub(crate) work: String,
    /// Changes whenever the part has done some of it.
    pub(crate) progress: String,
    /// How long the part may take to do any of it.
    pub(crate) patience: Duration,
}

/// Finds parts that have work and do none of it, by comparing several checks.
///
/// Checks may be far apart: work that waits in two of them with the same progress was not touched in between.
#[derive(Default)]
pub(crate) struct StallDetector {
    seen: HashMap<(String, String), Seen>,
}

struct Seen {
    progress: String,
    since: Instant,
}

impl StallDetector {
    /// Compares this check with the ones before. Returns each part that is stalled, with the reason.
    pub(crate) fn observe(&mut self, now: Instant, waiting: Vec<WaitingWork>) -> Vec<(String, String)> {
        let mut seen = HashMap::with_capacity(waiting.len());
        let mut stalled = Vec::new();
        for WaitingWork { part, work, progress, patience } in waiting {
            let key = (part, work);
            let before = self.seen.remove(&key).filter(|before| before.progress == progress);
            let since = before.map_or(now, |before| before.since);
            if now - since > patience {
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

    const PATIENCE: Duration = Duration::from_secs(30);

    fn waiting(part: &str, progress: u32) -> WaitingWork {
        let (part, work) = (part.to_owned(), "topic".to_owned());
        WaitingWork { part, work, progress: progress.to_string(), patience: PATIENCE }
    }

    #[tokio::test(start_paused = true)]
    async fn a_part_is_stalled_when_its_work_waits_without_progress() {
        let (mut stalls, start) = (StallDetector::default(), Instant::now());
        let later = start + PATIENCE + Duration::from_secs(1);
        assert!(stalls.observe(start, vec![waiting("a", 1), waiting("b", 1), waiting("c", 1)]).is_empty());
        // One is stalled, one has done something, one has nothing left to do.
        let stalled = stalls.observe(later, vec![waiting("a", 1), waiting("b", 2)]);
        assert_eq!(stalled, [("a".to_owned(), "no progress for 31 s while work waits: topic".to_owned())]);
        // Work that comes again has its whole patience again.
        assert!(stalls.observe(later, vec![waiting("c", 1)]).is_empty());
    }
}
