use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// When an ack waits longer than this for its commit, no more acks are accepted.
const OVERDUE: Duration = Duration::from_secs(1);

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

    /// True if commits fail or are not answered.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        self.since.is_some_and(|since| now.saturating_duration_since(since) > OVERDUE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acks_are_overdue_until_a_commit_after_them_succeeds() {
        let (mut uncommitted, start) = (Uncommitted::default(), Instant::now());
        let later = start + OVERDUE + Duration::from_millis(1);
        assert!(!uncommitted.is_overdue(later), "nothing was acked");
        uncommitted.add([1, 2], start);
        assert!(!uncommitted.is_overdue(start + OVERDUE));
        assert!(uncommitted.is_overdue(later));
        let taken = uncommitted.take();
        uncommitted.add(taken, later);
        assert!(uncommitted.is_overdue(later), "the commit failed");
        uncommitted.take();
        uncommitted.add([3], later);
        uncommitted.committed(later);
        assert!(!uncommitted.is_overdue(later + OVERDUE), "the ack after the commit is young");
        uncommitted.remove(&BTreeSet::from([3]));
        assert!(!uncommitted.is_overdue(later + 2 * OVERDUE));
    }
}
