use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::renewer::deadline;
use super::shared::Shared;
use crate::{Claimed, Source};

/// The hot queue of a relay: items that their writer inserted pre-claimed go straight to the workers, and need not be
/// claimed from the source.
///
/// It has a capacity of its own. When it is full, a new item waits in the source to be claimed like any other.
pub struct HotQueue<T> {
    /// Weak, because the relay owns the source, and the source owns this queue: otherwise neither would ever be
    /// dropped.
    relay: Weak<dyn HotRelay<T>>,
    permits: Arc<Semaphore>,
}

/// The relay of a hot queue, without the type of its source.
trait HotRelay<T>: Send + Sync {
    fn now(&self) -> u64;
    fn lease(&self) -> Duration;
    fn is_open(&self) -> bool;
    fn is_over_bytes(&self) -> bool;
    fn push(&self, items: Vec<(Claimed<T>, OwnedSemaphorePermit)>, deadline: u64) -> Result<(), Vec<Claimed<T>>>;
    fn count_dropped(&self);
    fn count_skipped_delayed(&self);
}

/// A place in the hot queue for one item.
pub struct HotPermit(OwnedSemaphorePermit);

/// The time until which a hot item may be delivered. It must be computed before the item is claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HotDeadline(u64);

impl<T> Clone for HotQueue<T> {
    fn clone(&self) -> Self {
        Self { relay: self.relay.clone(), permits: self.permits.clone() }
    }
}

impl<T: Send + Sync + 'static> HotQueue<T> {
    pub(super) fn new<S: Source<Item = T>>(relay: Arc<Shared<S>>, capacity: usize) -> Self {
        relay.in_flight.set_hot_capacity(capacity);
        let permits = Arc::new(Semaphore::new(capacity.min(Semaphore::MAX_PERMITS)));
        let relay: Arc<dyn HotRelay<T>> = relay;
        Self { relay: Arc::downgrade(&relay), permits }
    }

    /// True while the relay accepts items.
    pub fn is_open(&self) -> bool {
        self.relay.upgrade().is_some_and(|relay| relay.is_open())
    }

    /// Returns a place for one item. `None` if there is no room, which is counted as dropped: the item waits in the
    /// source.
    pub fn permit(&self) -> Option<HotPermit> {
        let relay = self.relay.upgrade()?;
        let permit = self.permits.clone().try_acquire_owned().ok().filter(|_| !relay.is_over_bytes());
        if permit.is_none() {
            relay.count_dropped();
        }
        permit.map(HotPermit)
    }

    /// Counts an item that is not hot because it is delayed.
    pub fn skip_delayed(&self) {
        if let Some(relay) = self.relay.upgrade() {
            relay.count_skipped_delayed();
        }
    }

    /// The deadline of an item whose lease starts now or later.
    pub fn deadline(&self) -> HotDeadline {
        let relay = self.relay.upgrade();
        HotDeadline(relay.map_or(0, |relay| deadline(relay.now(), relay.lease())))
    }

    /// Delivers items that were claimed after the deadline `until` was computed. If it has passed, or if the relay is
    /// stopping, returns the items as an error, and the caller must release them.
    pub fn push(&self, items: Vec<(Claimed<T>, HotPermit)>, until: HotDeadline) -> Result<(), Vec<Claimed<T>>> {
        match self.relay.upgrade().filter(|relay| relay.now() < until.0) {
            Some(relay) => {
                relay.push(items.into_iter().map(|(claimed, permit)| (claimed, permit.0)).collect(), until.0)
            }
            None => Err(items.into_iter().map(|(claimed, _)| claimed).collect()),
        }
    }
}

impl<S: Source> HotRelay<S::Item> for Shared<S> {
    fn now(&self) -> u64 {
        self.clock.now()
    }

    fn lease(&self) -> Duration {
        self.source.lease()
    }

    fn is_open(&self) -> bool {
        self.in_flight.accepts_hot()
    }

    fn is_over_bytes(&self) -> bool {
        self.in_flight.is_over_bytes()
    }

    fn push(
        &self,
        items: Vec<(Claimed<S::Item>, OwnedSemaphorePermit)>,
        deadline: u64,
    ) -> Result<(), Vec<Claimed<S::Item>>> {
        let count = items.len();
        self.queue.push_hot(self.in_flight.add_hot(items, deadline)?);
        self.metrics.hot(count);
        self.report_depths();
        self.renew_if_old(deadline);
        Ok(())
    }

    fn count_dropped(&self) {
        self.metrics.hot_dropped();
    }

    fn count_skipped_delayed(&self) {
        self.metrics.hot_skipped_delayed();
    }
}
