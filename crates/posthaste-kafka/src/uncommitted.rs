use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// A commit may always take this long, however short the lease is.
const PATIENCE: Duration = Duration::from_secs(2);

/// Partitions with progress that is not committed.
#[derive(Default)]
pub(crate) struct Uncommitted {
    acks: BTreeMap<i64, Acks>,
}

/// The acks of one partition that are not committed.
struct Acks {
    /// A time before the oldest of them.
    since: Instant,
    /// The time of the newest.
    latest: Instant,
}

impl Uncommitted {
    /// Adds partitions with new progress.
    pub(crate) fn add(&mut self, partitions: impl IntoIterator<Item = i64>, now: Instant) {
        for partition in partitions {
            self.acks.entry(partition).or_insert(Acks { since: now, latest: now }).latest = now;
        }
    }

    /// All partitions with progress that is not committed.
    pub(crate) fn partitions(&self) -> BTreeSet<i64> {
        self.acks.keys().copied().collect()
    }

    /// A commit of these partitions that began at this time has succeeded.
    pub(crate) fn committed(&mut self, partitions: &BTreeSet<i64>, begun_at: Instant) {
        for partition in partitions {
            match self.acks.get_mut(partition) {
                Some(acks) if acks.latest >= begun_at => acks.since = begun_at,
                _ => _ = self.acks.remove(partition),
            }
        }
    }

    /// The commit waits for the end of a rebalance, which does not mean that the cluster is out of reach.
    pub(crate) fn postpone(&mut self, now: Instant) {
        self.acks.values_mut().for_each(|acks| acks.since = now);
    }

    /// The partitions among these with progress that is not committed.
    pub(crate) fn among(&self, partitions: &BTreeSet<i64>) -> BTreeSet<i64> {
        partitions.iter().filter(|id| self.acks.contains_key(id)).copied().collect()
    }

    /// These partitions belong to another consumer now: their progress is lost.
    pub(crate) fn remove(&mut self, partitions: &BTreeSet<i64>) {
        self.acks.retain(|id, _| !partitions.contains(id));
    }

    /// True if an ack of this partition waits for its commit for longer than a lease: commits fail or are not answered.
    pub(crate) fn is_overdue(&self, partition: i64, now: Instant, lease: Duration) -> bool {
        let waits = |acks: &Acks| now.saturating_duration_since(acks.since);
        self.acks.get(&partition).is_some_and(|acks| waits(acks) > lease.max(PATIENCE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(5);

    #[test]
    fn acks_are_overdue_until_a_commit_after_them_succeeds() {
        let (mut uncommitted, start) = (Uncommitted::default(), Instant::now());
        let later = start + LEASE + Duration::from_millis(1);
        let both = BTreeSet::from([1, 2]);
        assert!(!uncommitted.is_overdue(1, later, LEASE), "nothing was acked");
        uncommitted.add([1, 2], start);
        assert!(!uncommitted.is_overdue(1, start + LEASE, LEASE));
        uncommitted.add([1], start + LEASE);
        assert!(uncommitted.is_overdue(1, later, LEASE), "its first ack is old");
        uncommitted.committed(&both, start + LEASE);
        assert_eq!(uncommitted.partitions(), BTreeSet::from([1]), "it was acked when the commit began");
        assert!(!uncommitted.is_overdue(1, later + LEASE / 2, LEASE), "the ack after the commit is young");
        uncommitted.postpone(later + LEASE);
        assert!(!uncommitted.is_overdue(1, later + 2 * LEASE, LEASE), "a rebalance came in between");
        uncommitted.remove(&both);
        assert!(!uncommitted.is_overdue(1, later + 9 * LEASE, LEASE), "nothing is left");
    }

    #[test]
    fn a_partition_that_cannot_be_committed_does_not_make_others_overdue() {
        let (mut uncommitted, start) = (Uncommitted::default(), Instant::now());
        uncommitted.add([1, 2], start);
        uncommitted.committed(&BTreeSet::from([2]), start + LEASE);
        uncommitted.add([2], start + LEASE);
        let later = start + LEASE + Duration::from_millis(1);
        assert!(uncommitted.is_overdue(1, later, LEASE) && !uncommitted.is_overdue(2, later, LEASE));
    }
}
