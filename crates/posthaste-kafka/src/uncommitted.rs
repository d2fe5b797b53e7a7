use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// A commit may always take this long, however short the lease is.
const PATIENCE: Duration = Duration::from_secs(2);

/// Partitions with progress that is not committed.
#[derive(Default)]
pub(crate) struct Uncommitted {
    partitions: BTreeSet<i64>,
    /// A time before the oldest of the acks that are not committed; `None` if all are.
    since: Option<Instant>,
}

impl Uncommitted {
    /// Adds partitions with new progress.
    pub(crate) fn add(&mut self, partitions: impl IntoIterator<Item = i64>, now: Instant) {
        self.partitions.extend(partitions);
        if !self.partitions.is_empty() {
            self.since.get_or_insert(now);
        }
    }

    /// Takes the partitions, to commit them.
    pub(crate) fn take(&mut self) -> BTreeSet<i64> {
        std::mem::take(&mut self.partitions)
    }

    /// A commit of all that was taken at this time has succeeded.
    pub(crate) fn committed(&mut self, taken_at: Instant) {
        self.since = (!self.partitions.is_empty()).then_some(taken_at);
    }

    /// The commit waits for the end of a rebalance, which does not mean that the cluster is out of reach.
    pub(crate) fn postpone(&mut self, now: Instant) {
        self.since = self.since.map(|_| now);
    }

    /// The partitions among these with progress that is not committed.
    pub(crate) fn among(&self, partitions: &BTreeSet<i64>) -> BTreeSet<i64> {
        self.partitions.intersection(partitions).copied().collect()
    }

    /// These partitions belong to another consumer now: their progress is lost.
    pub(crate) fn remove(&mut self, partitions: &BTreeSet<i64>) {
        self.partitions.retain(|id| !partitions.contains(id));
        if self.partitions.is_empty() {
            self.since = None;
        }
    }

    /// True if an ack waits for its commit for longer than a lease: commits fail or are not answered.
    pub(crate) fn is_overdue(&self, now: Instant, lease: Duration) -> bool {
        self.since.is_some_and(|since| now.saturating_duration_since(since) > lease.max(PATIENCE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acks_are_overdue_until_a_commit_after_them_succeeds() {
        const LEASE: Duration = Duration::from_secs(5);
        let (mut uncommitted, start) = (Uncommitted::default(), Instant::now());
        let later = start + LEASE + Duration::from_millis(1);
        assert!(!uncommitted.is_overdue(later, LEASE), "nothing was acked");
        uncommitted.add([1, 2], start);
        assert!(!uncommitted.is_overdue(start + LEASE, LEASE));
        assert!(uncommitted.is_overdue(later, LEASE));
        let taken = uncommitted.take();
        uncommitted.add(taken, later);
        assert!(uncommitted.is_overdue(later, LEASE), "the commit failed");
        uncommitted.take();
        uncommitted.add([3], later);
        uncommitted.committed(later);
        assert!(!uncommitted.is_overdue(later + LEASE, LEASE), "the ack after the commit is young");
        uncommitted.postpone(later + LEASE);
        assert!(!uncommitted.is_overdue(later + 2 * LEASE, LEASE), "a rebalance came in between");
        uncommitted.remove(&BTreeSet::from([3]));
        assert!(!uncommitted.is_overdue(later + 9 * LEASE, LEASE), "nothing is left");
    }
}
