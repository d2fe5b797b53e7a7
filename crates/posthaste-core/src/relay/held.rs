use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use crate::Claimed;

/// A claimed item from its claim to its settlement.
pub(crate) struct Held<T> {
    pub(crate) claimed: Claimed<T>,
    /// Its place in the table of held items.
    pub(super) ticket: u64,
    /// The first ticket of the claim that it came with.
    pub(super) claim: u64,
    /// Microseconds on the relay's clock after which it must not be delivered any more; 0 once the lease is lost.
    deadline: AtomicU64,
    /// Not to be started any more, though it is held.
    revoked: AtomicBool,
    /// Of what came in hot: its place among those, given back when it is settled.
    permit: Option<OwnedSemaphorePermit>,
}

impl<T> Held<T> {
    pub(super) fn new(claimed: Claimed<T>, ticket: u64, deadline: u64, permit: Option<OwnedSemaphorePermit>) -> Self {
        Self {
            claimed,
            ticket,
            claim: ticket,
            deadline: AtomicU64::new(deadline),
            revoked: AtomicBool::new(false),
            permit,
        }
    }

    /// One of a claim whose first ticket is this.
    pub(super) fn of_claim(self, claim: u64) -> Self {
        Self { claim, ..self }
    }

    pub(crate) fn detached(claimed: Claimed<T>) -> Self {
        Self::new(claimed, 0, u64::MAX, None)
    }

    pub(super) fn is_hot(&self) -> bool {
        self.permit.is_some()
    }

    /// Whether its delivery may start at this moment.
    pub(super) fn may_start(&self, now: u64) -> bool {
        now < self.deadline() && !self.revoked.load(Ordering::Relaxed)
    }

    pub(super) fn revoke(&self) {
        self.revoked.store(true, Ordering::Relaxed);
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
