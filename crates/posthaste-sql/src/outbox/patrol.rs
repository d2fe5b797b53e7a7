use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use posthaste_core::outbox::Position;

/// How many blocked rows are looked at in one go.
pub(crate) const SWEEP_BATCH: usize = 1_000;
/// How long between two stretches, and how long after the last one: however many rows are blocked, no claim waits for a
/// look at all of them.
const PACE: Duration = Duration::from_secs(1);
const REST: Duration = Duration::from_secs(60);

const BEGINNING: Position = Position { due: i64::MIN, seq: i64::MIN };

/// Walks through what is blocked for rows that wait for nobody, as only somebody else's statement can leave them behind.
pub(crate) struct Sweeper(Mutex<Walk>);

struct Walk {
    next: Instant,
    after: Position,
}

impl Sweeper {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Walk { next: Instant::now(), after: BEGINNING }))
    }

    /// Behind which row to look now, when it is time.
    pub(crate) fn next(&self) -> Option<Position> {
        let mut walk = self.walk();
        let now = Instant::now();
        if now < walk.next {
            return None;
        }
        walk.next = now + PACE;
        Some(walk.after)
    }

    /// So many rows were looked at, the last of them here.
    pub(crate) fn looked(&self, rows: usize, last: Option<Position>) {
        let mut walk = self.walk();
        match last.filter(|_| rows >= SWEEP_BATCH) {
            Some(last) => walk.after = last,
            None => *walk = Walk { next: Instant::now() + REST, after: BEGINNING },
        }
    }

    fn walk(&self) -> MutexGuard<'_, Walk> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_walks_in_stretches_and_rests_at_the_end() {
        let sweeper = Sweeper::new();
        assert_eq!(sweeper.next(), Some(BEGINNING));
        assert_eq!(sweeper.next(), None, "not so soon");
        let last = Position { due: 1, seq: 2 };
        sweeper.looked(SWEEP_BATCH, Some(last));
        sweeper.walk().next = Instant::now();
        assert_eq!(sweeper.next(), Some(last));
        sweeper.looked(3, Some(Position { due: 5, seq: 6 }));
        assert!(sweeper.walk().next > Instant::now() + REST / 2);
        sweeper.walk().next = Instant::now();
        assert_eq!(sweeper.next(), Some(BEGINNING));
    }
}
