use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::letters::Letter;

/// The letters that this process has claimed and not settled, whatever became of their leases in the table.
///
/// It goes by a clock that nobody sets: a wall clock that is put forward by more than a lease ends all leases in the
/// table, and what is being delivered just now must not be claimed a second time for that.
#[derive(Default)]
pub(super) struct InFlight(Mutex<HashMap<String, Hold>>);

struct Hold {
    /// Tells two claims of the same letter apart.
    lock: String,
    /// What nobody renewed by then was orphaned, and may be claimed again.
    until: Instant,
}

impl InFlight {
    /// What must not be claimed now.
    pub(super) fn ids(&self, now: Instant) -> Vec<String> {
        let mut holds = self.holds();
        holds.retain(|_, hold| hold.until > now);
        holds.keys().cloned().collect()
    }

    pub(super) fn add<'a>(&self, letters: impl IntoIterator<Item = &'a Letter>, until: Instant) {
        let hold = |letter: &Letter| (letter.id.clone(), Hold { lock: letter.lock.clone(), until });
        self.holds().extend(letters.into_iter().map(hold));
    }

    pub(super) fn extend(&self, letter: &Letter, until: Instant) {
        if let Some(hold) = self.holds().get_mut(&letter.id).filter(|hold| hold.lock == letter.lock) {
            hold.until = until;
        }
    }

    pub(super) fn remove<'a>(&self, letters: impl IntoIterator<Item = &'a Letter>) {
        let mut holds = self.holds();
        for letter in letters {
            if holds.get(&letter.id).is_some_and(|hold| hold.lock == letter.lock) {
                holds.remove(&letter.id);
            }
        }
    }

    pub(super) fn clear(&self) {
        self.holds().clear();
    }

    fn holds(&self) -> MutexGuard<'_, HashMap<String, Hold>> {
        // Each change is one of the map, so a poisoned lock guards nothing half-done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
