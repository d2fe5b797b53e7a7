use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

/// A statement that takes longer than this blocks new deliveries until it has finished.
const SLOW_STATEMENT: Duration = Duration::from_millis(500);

/// Decides if the workers may start new deliveries.
///
/// After a crash, deliveries whose outcome was not settled are repeated. So the relay starts no delivery while it
/// cannot settle outcomes or renew leases: a crash then repeats only the deliveries that had already started.
pub(super) struct Backpressure {
    /// The number of outcomes that are known and not settled, without those of attempts that could not be made, which
    /// are tried again with or without a crash.
    unsettled: AtomicUsize,
    max_unsettled: usize,
    pub(super) settling: Statement,
    pub(super) renewing: Statement,
    eased: Notify,
}

/// The state of one kind of statement. Times are microseconds on the relay's clock.
#[derive(Default)]
pub(super) struct Statement {
    /// When the running statement was sent; 0 if none is running.
    sent: AtomicU64,
    failing: AtomicBool,
}

impl Statement {
    fn blocks_start(&self, now: u64) -> bool {
        let sent = self.sent.load(Ordering::Acquire);
        let is_slow = sent != 0 && now.saturating_sub(sent) > SLOW_STATEMENT.as_micros() as u64;
        is_slow || self.is_failing()
    }

    /// True if the last attempt failed.
    pub(super) fn is_failing(&self) -> bool {
        self.failing.load(Ordering::Acquire)
    }
}

impl Backpressure {
    /// `max_unsettled` is the number of unsettled outcomes at which no new delivery starts.
    pub(super) fn new(max_unsettled: usize) -> Self {
        Self {
            unsettled: AtomicUsize::new(0),
            max_unsettled,
            settling: Statement::default(),
            renewing: Statement::default(),
            eased: Notify::new(),
        }
    }

    /// True if a delivery may start now.
    pub(super) fn allows_start(&self, now: u64) -> bool {
        self.unsettled.load(Ordering::Acquire) < self.max_unsettled
            && !self.settling.blocks_start(now)
            && !self.renewing.blocks_start(now)
    }

    /// Waits until [`allows_start`](Self::allows_start) is true. Only a finished statement can make it true again, so
    /// no timer is needed.
    pub(super) async fn eased(&self, now: impl Fn() -> u64) {
        loop {
            let eased = self.eased.notified();
            if self.allows_start(now()) {
                return;
            }
            eased.await;
        }
    }

    /// Counts an outcome that is known and waits to be settled.
    pub(super) fn add_unsettled(&self) {
        self.unsettled.fetch_add(1, Ordering::AcqRel);
    }

    /// Subtracts outcomes that are settled.
    pub(super) fn remove_unsettled(&self, count: usize) {
        self.unsettled.fetch_sub(count, Ordering::AcqRel);
        self.eased.notify_waiters();
    }

    pub(super) fn unsettled(&self) -> usize {
        self.unsettled.load(Ordering::Acquire)
    }

    pub(super) fn sent(&self, statement: &Statement, now: u64) {
        statement.sent.store(now.max(1), Ordering::Release);
    }

    pub(super) fn answered(&self, statement: &Statement, succeeded: bool) {
        statement.failing.store(!succeeded, Ordering::Release);
        statement.sent.store(0, Ordering::Release);
        self.eased.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_delivery_starts_while_a_statement_is_slow_or_failing_or_too_many_outcomes_wait() {
        let backpressure = Backpressure::new(2);
        assert!(backpressure.allows_start(1));
        for statement in [&backpressure.settling, &backpressure.renewing] {
            backpressure.sent(statement, 1_000);
            assert!(backpressure.allows_start(400_000), "a statement may take a moment");
            assert!(!backpressure.allows_start(600_000), "it takes too long");
            backpressure.answered(statement, false);
            assert!(!backpressure.allows_start(600_000), "it failed");
            backpressure.answered(statement, true);
            assert!(backpressure.allows_start(600_000));
        }
        backpressure.add_unsettled();
        assert!(backpressure.allows_start(1));
        backpressure.add_unsettled();
        assert!(!backpressure.allows_start(1), "two outcomes wait");
        backpressure.remove_unsettled(1);
        assert!(backpressure.allows_start(1));
    }
}
