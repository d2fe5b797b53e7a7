use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use posthaste_core::lock;
use tokio::time::Instant;

/// The most ids that are remembered.
const MAX_IDS: usize = 10_000;
/// An id is remembered for at least this long. Records that wait for it are decoded again much sooner.
const MEMORY: Duration = Duration::from_secs(600);

/// How often old ids are looked for.
const CLEAN_INTERVAL: Duration = Duration::from_secs(1);

/// The ids that a registry does not know, and since when.
#[derive(Default)]
pub(super) struct UnknownIds {
    ids: Mutex<Ids>,
}

#[derive(Default)]
struct Ids {
    since: HashMap<i32, Instant>,
    cleaned_at: Option<Instant>,
}

impl UnknownIds {
    /// True if a replica of the registry may still learn this id: it is unknown for less than `replica_lag`.
    ///
    /// If too many ids are unknown, a further one counts as unknown for good. To forget others instead would give them
    /// the full time again, and the records that wait for them would wait for ever.
    pub(super) fn may_be_learnt(&self, id: i32, replica_lag: Duration, now: Instant) -> bool {
        let mut ids = lock(&self.ids);
        if !ids.since.contains_key(&id) && ids.since.len() >= MAX_IDS {
            ids.forget_old(replica_lag, now);
            if ids.since.len() >= MAX_IDS {
                return false;
            }
        }
        now.duration_since(*ids.since.entry(id).or_insert(now)) < replica_lag
    }
}

impl Ids {
    fn forget_old(&mut self, replica_lag: Duration, now: Instant) {
        if self.cleaned_at.is_none_or(|at| now.duration_since(at) >= CLEAN_INTERVAL) {
            self.since.retain(|_, since| now.duration_since(*since) < replica_lag.max(MEMORY));
            self.cleaned_at = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAG: Duration = Duration::from_secs(10);

    #[tokio::test]
    async fn every_id_is_unknown_for_good_after_a_while_however_many_there_are() {
        const IDS: i32 = 3 * MAX_IDS as i32;
        let (ids, start) = (UnknownIds::default(), Instant::now());
        assert!(ids.may_be_learnt(0, LAG, start));
        assert!(ids.may_be_learnt(0, LAG, start + LAG / 2));
        (1..IDS).for_each(|id| _ = ids.may_be_learnt(id, LAG, start));
        assert!((0..IDS).all(|id| !ids.may_be_learnt(id, LAG, start + LAG)), "an id has to wait again");
        assert!(lock(&ids.ids).since.len() <= MAX_IDS);
        assert!(ids.may_be_learnt(IDS, LAG, start + MEMORY), "old ids are forgotten");
    }
}
