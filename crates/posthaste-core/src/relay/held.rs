use std::sync::atomic::{AtomicU64, Ordering};

use tokio::time::Instant;

use crate::Claimed;

/// A claimed item from its claim to its settlement.
pub(crate) struct Held<T> {
    pub(crate) claimed: Claimed<T>,
    /// Its place in the table of held items.
    pub(super) ticket: u64,
    /// Microseconds on the relay's clock after which it must not be delivered any more; 0 once the lease is lost.
    deadline: AtomicU64,
}

impl<T> Held<T> {
    pub(super) fn new(claimed: Claimed<T>, ticket: u64, deadline: u64) -> Self {
        Self { claimed, ticket, deadline: AtomicU64::new(deadline) }
    }

    pub(crate) fn detached(claimed: Claimed<T>) -> Self {
        Self::new(claimed, 0, u64::MAX)
    }

    pub(super) fn deadline(&self) -> u64 {
        self.deadline.load(Ordering::Relaxed)
    }

    pub(super) fn extend(&self, deadline: u64) {
        self.deadline.store(deadline, Ordering::Relaxed);
    }

    pub(super) fn lose(&self) {
        self.deadline.store(0, Ordering::Relaxed);
    }
}

/// Monotonic microseconds since the relay was made: cheap to keep per item and to compare.
#[derive(Clone, Copy)]
pub(super) struct RelayClock(Instant);

impl RelayClock {
    pub(super) fn start() -> Self {
        Self(Instant::now())
    }

    pub(super) fn now(&self) -> u64 {
        self.0.elapsed().as_micros() as u64
    }
}
