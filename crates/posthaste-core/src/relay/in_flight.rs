use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::Instant;

use super::RelayOptions;
use super::queue::Run;
use crate::{Claimed, lock};

/// Everything that a relay has claimed and not settled, with the limits on how much that may be.
pub(super) struct InFlight<T> {
    table: Mutex<Table<T>>,
    max_items: usize,
    max_bytes: usize,
    /// How many hot items may be in flight. They do not count against `max_items`.
    hot_capacity: AtomicUsize,
    /// Notified when items were settled or released, so that there is room for more.
    pub(super) freed: Notify,
}

struct Table<T> {
    items: HashMap<u64, Arc<InFlightItem<T>>>,
    bytes: usize,
    /// How many of the items came through the hot queue.
    hot: usize,
    accepts_hot: bool,
    next_number: u64,
}

/// One claimed item, from its claim to its settlement.
pub(crate) struct InFlightItem<T> {
    pub(crate) claimed: Claimed<T>,
    /// Identifies the item within its relay. Items have ascending numbers in the order of their claims.
    pub(super) number: u64,
    /// The number of the first item of the same claim.
    claim: u64,
    /// Microseconds on the relay's clock after which the item must not be delivered; 0 once its lease is lost.
    deadline: AtomicU64,
    /// The item must not be delivered, although it is still in flight.
    revoked: AtomicBool,
    /// Hot items only: the item's place in the hot queue, which is free again when the item is settled.
    permit: Option<OwnedSemaphorePermit>,
}

impl<T> InFlight<T> {
    pub(super) fn new(options: &RelayOptions) -> Self {
        let table = Table { items: HashMap::new(), bytes: 0, hot: 0, accepts_hot: true, next_number: 1 };
        Self {
            table: Mutex::new(table),
            max_items: options.max_in_flight.max(1),
            max_bytes: options.max_bytes,
            hot_capacity: AtomicUsize::new(usize::MAX),
            freed: Notify::new(),
        }
    }

    /// How many more items may be claimed now.
    pub(super) fn room(&self) -> usize {
        let table = lock(&self.table);
        match table.bytes >= self.max_bytes {
            true => 0,
            false => self.max_items.saturating_sub(table.items.len() - table.hot),
        }
    }

    /// Adds the items of one claim, to be delivered before `deadline`. Returns them as runs: the items of one key in
    /// their order, every item without a key alone.
    pub(super) fn add(&self, items: Vec<Claimed<T>>, deadline: u64) -> Vec<Run<T>> {
        let mut runs: Vec<Run<T>> = Vec::with_capacity(items.len());
        let mut run_of_key: HashMap<Arc<str>, usize> = HashMap::new();
        let mut table = lock(&self.table);
        let claim = table.next_number;
        for claimed in items {
            let key = claimed.key.clone();
            let item = table.insert(claimed, claim, deadline, None);
            match key.as_ref().and_then(|key| run_of_key.get(key)) {
                Some(&run) => runs[run].push_back(item),
                None => {
                    if let Some(key) = key {
                        run_of_key.insert(key, runs.len());
                    }
                    runs.push(VecDeque::from([item]));
                }
            }
        }
        runs
    }

    /// Adds hot items. Returns them as an error if the relay is stopping.
    pub(super) fn add_hot(
        &self,
        items: Vec<(Claimed<T>, OwnedSemaphorePermit)>,
        deadline: u64,
    ) -> Result<Vec<Run<T>>, Vec<Claimed<T>>> {
        let mut table = lock(&self.table);
        if !table.accepts_hot {
            return Err(items.into_iter().map(|(claimed, _)| claimed).collect());
        }
        let add = |(claimed, permit)| {
            let claim = table.next_number;
            VecDeque::from([table.insert(claimed, claim, deadline, Some(permit))])
        };
        Ok(items.into_iter().map(add).collect())
    }

    /// Removes items that are settled or released.
    pub(super) fn remove<'a>(&self, items: impl IntoIterator<Item = &'a Arc<InFlightItem<T>>>)
    where
        T: 'a,
    {
        let mut table = lock(&self.table);
        for item in items {
            if table.items.remove(&item.number).is_some() {
                table.bytes -= item.claimed.bytes;
                table.hot -= usize::from(item.is_hot());
            }
        }
        drop(table);
        self.freed.notify_waiters();
    }

    /// Revokes the items with the same key and of the same claim as an item whose lease was lost. Another process may
    /// have claimed the lost item, so no item after it may be delivered before it.
    pub(super) fn revoke_run(&self, lost: &InFlightItem<T>) {
        let Some(key) = &lost.claimed.key else { return };
        for item in lock(&self.table).items.values() {
            if item.claim == lost.claim && item.claimed.key.as_ref() == Some(key) {
                item.revoked.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Waits until nothing is in flight.
    pub(super) async fn emptied(&self) {
        loop {
            let freed = self.freed.notified();
            if self.len() == 0 {
                return;
            }
            freed.await;
        }
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.table).items.len()
    }

    pub(super) fn all(&self) -> Vec<Arc<InFlightItem<T>>> {
        lock(&self.table).items.values().cloned().collect()
    }

    pub(super) fn take_all(&self) -> Vec<Arc<InFlightItem<T>>> {
        let mut table = lock(&self.table);
        (table.bytes, table.hot) = (0, 0);
        table.items.drain().map(|(_, item)| item).collect()
    }

    /// Refuses hot items from now on.
    pub(super) fn refuse_hot(&self) {
        lock(&self.table).accepts_hot = false;
    }

    pub(super) fn accepts_hot(&self) -> bool {
        lock(&self.table).accepts_hot
    }

    pub(super) fn is_over_bytes(&self) -> bool {
        lock(&self.table).bytes >= self.max_bytes
    }

    pub(super) fn set_hot_capacity(&self, capacity: usize) {
        self.hot_capacity.store(capacity, Ordering::Relaxed);
    }

    pub(super) fn hot_capacity(&self) -> usize {
        self.hot_capacity.load(Ordering::Relaxed)
    }
}

impl<T> Table<T> {
    fn insert(
        &mut self,
        claimed: Claimed<T>,
        claim: u64,
        deadline: u64,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Arc<InFlightItem<T>> {
        let number = self.next_number;
        self.next_number += 1;
        self.bytes += claimed.bytes;
        self.hot += usize::from(permit.is_some());
        let item = Arc::new(InFlightItem::new(claimed, number, claim, deadline, permit));
        self.items.insert(number, item.clone());
        item
    }
}

impl<T> InFlightItem<T> {
    fn new(claimed: Claimed<T>, number: u64, claim: u64, deadline: u64, permit: Option<OwnedSemaphorePermit>) -> Self {
        Self { claimed, number, claim, deadline: AtomicU64::new(deadline), revoked: AtomicBool::new(false), permit }
    }

    /// An item without a relay, for tests.
    pub(crate) fn detached(claimed: Claimed<T>) -> Self {
        Self::new(claimed, 0, 0, u64::MAX, None)
    }

    pub(super) fn is_hot(&self) -> bool {
        self.permit.is_some()
    }

    /// True if its delivery may start now.
    pub(super) fn may_start(&self, now: u64) -> bool {
        now < self.deadline() && !self.revoked.load(Ordering::Relaxed)
    }

    pub(super) fn deadline(&self) -> u64 {
        self.deadline.load(Ordering::Relaxed)
    }

    /// Extends the deadline after a renewal.
    pub(super) fn extend(&self, deadline: u64) {
        self.deadline.store(deadline, Ordering::Relaxed);
    }

    /// Marks the lease as lost.
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
