use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

/// Work that waits for a part of the hub, as one look saw it.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    /// The part that has to do it.
    pub(crate) part: String,
    /// Which work that is, where the part has several kinds of it.
    pub(crate) work: String,
    /// Changes whenever the part has done some of it.
    pub(crate) progress: String,
    /// How long the part may take to do any of it.
    pub(crate) patience: Duration,
}

/// Finds parts that have work and do none of it, by comparing what several looks saw.
///
/// Looks may be far apart: work that waits in two of them, with the same progress, was not touched in between.
#[derive(Default)]
pub(crate) struct Standstill {
    seen: HashMap<(String, String), Seen>,
}

struct Seen {
    progress: String,
    since: Instant,
}

impl Standstill {
    /// Takes in what a look saw; answers with each part that stands still, what waits for it and for how long.
    pub(crate) fn observe(&mut self, now: Instant, waiting: Vec<Waiting>) -> Vec<(String, String)> {
        let mut seen = HashMap::with_capacity(waiting.len());
        let mut standing = Vec::new();
        for Waiting { part, work, progress, patience } in waiting {
            let key = (part, work);
            let before = self.seen.remove(&key).filter(|before| before.progress == progress);
            let since = before.map_or(now, |before| before.since);
            if now - since > patience {
                let (part, work) = &key;
                let detail = format!("no progress for {} s while work waits: {work}", (now - since).as_secs());
                standing.push((part.clone(), detail));
            }
            seen.insert(key, Seen { progress, since });
        }
        self.seen = seen;
        standing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn waiting(part: &str, progress: u32) -> Waiting {
        let (part, work) = (part.to_owned(), "topic".to_owned());
        Waiting { part, work, progress: progress.to_string(), patience: PATIENCE }
    }

    #[tokio::test(start_paused = true)]
    async fn a_part_stands_still_when_its_work_waits_without_progress() {
        let (mut standstill, start) = (Standstill::default(), Instant::now());
        let later = start + PATIENCE + Duration::from_secs(1);
        assert!(standstill.observe(start, vec![waiting("a", 1), waiting("b", 1), waiting("c", 1)]).is_empty());
        // One stands still, one has done something, one has nothing left to do.
        let standing = standstill.observe(later, vec![waiting("a", 1), waiting("b", 2)]);
        assert_eq!(standing, [("a".to_owned(), "no progress for 31 s while work waits: topic".to_owned())]);
        // Work that came anew has all the time again.
        assert!(standstill.observe(later, vec![waiting("c", 1)]).is_empty());
    }
}
