use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use posthaste_core::outbox::Position;

/// How many parked rows are looked at in one go.
pub(crate) const STRETCH: usize = 1_000;
/// How long between two stretches, and how long after the last one: however many rows are parked, no claim waits for a
/// look at all of them.
const PACE: Duration = Duration::from_secs(1);
const REST: Duration = Duration::from_secs(60);

const BEGINNING: Position = Position { due: i64::MIN, seq: i64::MIN };

/// Walks through what is parked for rows that wait for nobody, as only somebody else's statement can leave them behind.
pub(crate) struct Patrol(Mutex<Walk>);

struct Walk {
    next: Instant,
    behind: Position,
}

impl Patrol {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Walk { next: Instant::now(), behind: BEGINNING }))
    }

    /// Behind which row to look now, when it is time.
    pub(crate) fn next(&self) -> Option<Position> {
        let mut walk = self.walk();
        let now = Instant::now();
        if now < walk.next {
            return None;
        }
        walk.next = now + PACE;
        Some(walk.behind)
    }

    /// So many rows were looked at, the last of them here.
    pub(crate) fn looked(&self, rows: usize, last: Option<Position>) {
        let mut walk = self.walk();
        match last.filter(|_| rows >= STRETCH) {
            Some(last) => walk.behind = last,
            None => *walk = Walk { next: Instant::now() + REST, behind: BEGINNING },
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
        let patrol = Patrol::new();
        assert_eq!(patrol.next(), Some(BEGINNING));
        assert_eq!(patrol.next(), None, "not so soon");
        let last = Position { due: 1, seq: 2 };
        patrol.looked(STRETCH, Some(last));
        patrol.walk().next = Instant::now();
        assert_eq!(patrol.next(), Some(last));
        patrol.looked(3, Some(Position { due: 5, seq: 6 }));
        assert!(patrol.walk().next > Instant::now() + REST / 2);
        patrol.walk().next = Instant::now();
        assert_eq!(patrol.next(), Some(BEGINNING));
    }
}
