use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use posthaste_core::lock;
use tokio::time::Instant;

/// The most ids that are remembered.
const MAX_IDS: usize = 10_000;
/// An id is remembered for at least this long. Records that wait for it are decoded again much sooner.
const MEMORY: Duration = Duration::from_secs(600);

/// The ids that a registry does not know, and since when.
#[derive(Default)]
pub(super) struct UnknownIds {
    since: Mutex<HashMap<i32, Instant>>,
}

impl UnknownIds {
    /// True if a replica of the registry may still learn this id: it is unknown for less than `replica_lag`.
    ///
    /// If too many ids are unknown, a further one counts as unknown for good. To forget others instead would give them
    /// the full time again, and the records that wait for them would wait for ever.
    pub(super) fn may_be_learnt(&self, id: i32, replica_lag: Duration, now: Instant) -> bool {
        let mut ids = lock(&self.since);
        if !ids.contains_key(&id) && ids.len() >= MAX_IDS {
            ids.retain(|_, since| now.duration_since(*since) < replica_lag.max(MEMORY));
            if ids.len() >= MAX_IDS {
                return false;
            }
        }
        now.duration_since(*ids.entry(id).or_insert(now)) < replica_lag
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
        assert!(lock(&ids.since).len() <= MAX_IDS);
        assert!(ids.may_be_learnt(IDS, LAG, start + MEMORY), "old ids are forgotten");
    }
}
