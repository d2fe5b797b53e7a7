use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use super::RelayOptions;
use super::in_flight::InFlightItem;
use super::queue::Run;
use crate::{Disposition, lock};

/// The completion buffer: outcomes that are known and wait to be settled, and items that wait to be released.
pub(super) struct Completions<T> {
    waiting: Mutex<Batch<T>>,
    /// How many outcomes are settled together at most.
    batch_size: usize,
    /// Notified when there is something to settle that is worth waking up for.
    pub(super) added: Notify,
    /// An outcome must be settled at once, without waiting for more.
    urgent: AtomicBool,
}

/// What the settler removes from the buffer at a time.
pub(super) struct Batch<T> {
    pub(super) completed: Vec<Completion<T>>,
    pub(super) released: Vec<Arc<InFlightItem<T>>>,
}

/// A delivered item whose outcome is not settled yet.
pub(super) struct Completion<T> {
    pub(super) item: Arc<InFlightItem<T>>,
    pub(super) disposition: Disposition,
    pub(super) took: Duration,
    /// How often the store refused this settlement with a permanent error.
    pub(super) refusals: u32,
    /// How often the row was locked by another transaction.
    pub(super) lock_waits: u32,
}

impl<T> Completions<T> {
    pub(super) fn new(options: &RelayOptions) -> Self {
        Self {
            waiting: Mutex::new(Batch { completed: Vec::new(), released: Vec::new() }),
            batch_size: options.settle_batch.max(1),
            added: Notify::new(),
            urgent: AtomicBool::new(false),
        }
    }

    /// Adds an outcome, and the items that are released because of it. Wakes the settler for the first outcome of a
    /// batch, for an urgent one, and when `enough` outcomes wait.
    pub(super) fn push(&self, completion: Completion<T>, released: Run<T>, enough: usize) {
        let is_urgent = completion.item.claimed.urgent;
        if is_urgent {
            self.urgent.store(true, Ordering::Release);
        }
        let mut waiting = lock(&self.waiting);
        waiting.completed.push(completion);
        waiting.released.extend(released);
        let count = waiting.completed.len();
        drop(waiting);
        if count == 1 || count >= enough || is_urgent {
            self.added.notify_one();
        }
    }

    pub(super) fn release(&self, items: impl IntoIterator<Item = Arc<InFlightItem<T>>>) {
        lock(&self.waiting).released.extend(items);
        self.added.notify_one();
    }

    /// Removes and returns at most one batch of outcomes, and all items to release.
    pub(super) fn take_batch(&self) -> Batch<T> {
        self.urgent.store(false, Ordering::Release);
        let mut waiting = lock(&self.waiting);
        let count = waiting.completed.len().min(self.batch_size);
        let later = waiting.completed.split_off(count);
        let completed = std::mem::replace(&mut waiting.completed, later);
        Batch { completed, released: std::mem::take(&mut waiting.released) }
    }

    /// True if fewer outcomes wait than fit into a batch.
    pub(super) fn has_room(&self) -> bool {
        self.len() < self.batch_size
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.waiting).completed.len()
    }

    /// True if only a few outcomes wait, all of hot items. Settling these is not urgent: no row in the store is blocked
    /// by them, no claim needs their place, and the hot queue has room as long as fewer than `enough` of them wait.
    pub(super) fn may_linger(&self, enough: usize) -> bool {
        let waiting = lock(&self.waiting);
        let are_few = (1..enough).contains(&waiting.completed.len()) && waiting.released.is_empty();
        are_few && !self.is_urgent() && waiting.completed.iter().all(|completion| completion.item.is_hot())
    }

    fn is_urgent(&self) -> bool {
        self.urgent.load(Ordering::Acquire)
    }

    /// True if an urgent outcome was added since the last call.
    pub(super) fn take_urgent(&self) -> bool {
        self.urgent.swap(false, Ordering::AcqRel)
    }
}
