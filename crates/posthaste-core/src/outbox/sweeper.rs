use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use super::Position;
use crate::lock;

/// How many blocked rows one batch of a sweep reads.
pub(super) const SWEEP_BATCH: usize = 1_000;
/// The pause between two batches, and after the last one: however many rows are blocked, no claim waits for a sweep
/// over all of them.
const BATCH_PAUSE: Duration = Duration::from_secs(1);
const SWEEP_PAUSE: Duration = Duration::from_secs(60);

/// Ordered mode: decides when to sweep for orphans, which are blocked rows that no unfinished row precedes any more.
///
/// A settlement that finishes a row unblocks the rows after it in the same transaction. Only a statement of another
/// program (a DELETE, an UPDATE by hand) leaves an orphan.
pub(super) struct Sweeper(Mutex<Sweep>);

struct Sweep {
    next: Instant,
    after: Option<Position>,
}

impl Sweeper {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Sweep { next: Instant::now(), after: None }))
    }

    /// `Some` if it is time for a batch, with the row after which the batch begins.
    pub(super) fn next_batch(&self) -> Option<Option<Position>> {
        let (mut sweep, now) = (lock(&self.0), Instant::now());
        if now < sweep.next {
            return None;
        }
        sweep.next = now + BATCH_PAUSE;
        Some(sweep.after)
    }

    /// A batch was read. `last` is its last row if there may be more; if it is `None`, the sweep restarts after a
    /// pause.
    pub(super) fn finished_batch(&self, last: Option<Position>) {
        let mut sweep = lock(&self.0);
        match last {
            Some(last) => sweep.after = Some(last),
            None => *sweep = Sweep { next: Instant::now() + SWEEP_PAUSE, after: None },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_sweep_pauses_between_batches_and_longer_at_its_end() {
        let sweeper = Sweeper::new();
        assert_eq!(sweeper.next_batch(), Some(None));
        assert_eq!(sweeper.next_batch(), None, "not so soon");
        let last = Position { due: 1, seq: 2 };
        sweeper.finished_batch(Some(last));
        tokio::time::advance(BATCH_PAUSE).await;
        assert_eq!(sweeper.next_batch(), Some(Some(last)));
        sweeper.finished_batch(None);
        tokio::time::advance(SWEEP_PAUSE / 2).await;
        assert_eq!(sweeper.next_batch(), None);
        tokio::time::advance(SWEEP_PAUSE / 2).await;
        assert_eq!(sweeper.next_batch(), Some(None));
    }
}
