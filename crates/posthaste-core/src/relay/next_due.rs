use std::sync::Mutex;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::LONGEST_WAIT;
use crate::lock;

/// When the next retry is due, among those that this relay settled. The claimer sleeps until then at most.
#[derive(Default)]
pub(super) struct NextDue {
    at: Mutex<Option<Instant>>,
    /// Notified when an item is due earlier than the claimer knows.
    pub(super) moved: Notify,
}

impl NextDue {
    /// An item is due again after `wait`.
    pub(super) fn expect(&self, wait: Duration) {
        let due = Instant::now() + wait.min(LONGEST_WAIT);
        let mut at = lock(&self.at);
        if at.is_none_or(|at| due < at) {
            *at = Some(due);
            self.moved.notify_one();
        }
    }

    pub(super) fn get(&self) -> Option<Instant> {
        *lock(&self.at)
    }

    /// Removes a time that has passed: the claimer is about to claim everything that is due.
    pub(super) fn forget_due(&self, now: Instant) {
        lock(&self.at).take_if(|at| *at <= now);
    }
}
