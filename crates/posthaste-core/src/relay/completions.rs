use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use super::RelayOptions;
use super::in_flight::InFlightItem;
use super::queue::Run;
use crate::{Disposition, lock};

/// The most bytes of items that are settled at once and not done. A source may have to copy those: as dead letters.
const NOT_DONE_AT_ONCE: usize = 8 * 1024 * 1024;

/// Attempts that could not be made get at least one part in this many of a batch.
const UNMADE_PART: usize = 4;

/// The completion buffer: outcomes that are known and wait to be settled, and items that wait to be released.
pub(super) struct Completions<T> {
    waiting: Mutex<Waiting<T>>,
    /// How many outcomes are settled together at most.
    batch_size: usize,
    /// Notified when there is something to settle that is worth waking up for.
    pub(super) added: Notify,
    /// An outcome must be settled at once, without waiting for more.
    urgent: AtomicBool,
}

struct Waiting<T> {
    completed: VecDeque<Completion<T>>,
    /// Outcomes of attempts that could not be made. There may be many at the same moment, and they are tried again with
    /// or without a crash, so the others are settled first.
    unmade: VecDeque<Completion<T>>,
    released: Vec<Arc<InFlightItem<T>>>,
}

impl<T> Waiting<T> {
    fn len(&self) -> usize {
        self.completed.len() + self.unmade.len()
    }
}

/// What the settler removes from the buffer at a time.
pub(super) struct Batch<T> {
    pub(super) completed: Vec<Completion<T>>,
    pub(super) released: Vec<Arc<InFlightItem<T>>>,
}

impl<T> Batch<T> {
    /// Moves outcomes into this batch, until it has `limit` of them or the next one would make `bytes` too large.
    fn fill(&mut self, from: &mut VecDeque<Completion<T>>, limit: usize, bytes: &mut usize) {
        while self.completed.len() < limit {
            let fits = |next: &mut Completion<T>| {
                let more = next.unfinished_bytes();
                more == 0 || *bytes == 0 || *bytes + more <= NOT_DONE_AT_ONCE
            };
            let Some(next) = from.pop_front_if(fits) else { return };
            *bytes += next.unfinished_bytes();
            self.completed.push(next);
        }
    }
}

/// A delivered item whose outcome is not settled yet.
pub(super) struct Completion<T> {
    pub(super) item: Arc<InFlightItem<T>>,
    pub(super) disposition: Disposition,
    pub(super) took: Duration,
    /// False if the attempt could not be made, because of an outage.
    pub(super) is_made: bool,
    /// How often the store refused this settlement with a permanent error.
    pub(super) refusals: u32,
    /// How often the row was locked by another transaction.
    pub(super) lock_waits: u32,
}

impl<T> Completion<T> {
    fn unfinished_bytes(&self) -> usize {
        if self.disposition == Disposition::Done { 0 } else { self.item.claimed.bytes }
    }
}

impl<T> Completions<T> {
    pub(super) fn new(options: &RelayOptions) -> Self {
        Self {
            waiting: Mutex::new(Waiting { completed: VecDeque::new(), unmade: VecDeque::new(), released: Vec::new() }),
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
        match completion.is_made || is_urgent {
            true => waiting.completed.push_back(completion),
            false => waiting.unmade.push_back(completion),
        }
        waiting.released.extend(released);
        let count = waiting.len();
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
        let mut batch = Batch { completed: Vec::new(), released: std::mem::take(&mut waiting.released) };
        // Each with its own bytes, so that large outcomes of one kind do not keep the other from its part.
        let (mut bytes, mut unmade_bytes) = (0, 0);
        let for_unmade = waiting.unmade.len().min(self.batch_size.div_ceil(UNMADE_PART)).min(self.batch_size - 1);
        batch.fill(&mut waiting.completed, self.batch_size - for_unmade, &mut bytes);
        batch.fill(&mut waiting.unmade, self.batch_size, &mut unmade_bytes);
        batch
    }

    /// True if fewer outcomes wait than fit into a batch.
    pub(super) fn has_room(&self) -> bool {
        self.len() < self.batch_size
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.waiting).len()
    }

    /// True if only a few outcomes wait, all of hot items. Settling these is not urgent: no row in the store is blocked
    /// by them, no claim needs their place, and the hot queue has room as long as fewer than `enough` of them wait.
    pub(super) fn may_linger(&self, enough: usize) -> bool {
        let waiting = lock(&self.waiting);
        let are_few = (1..enough).contains(&waiting.len()) && waiting.released.is_empty();
        let mut completed = waiting.completed.iter().chain(&waiting.unmade);
        are_few && !self.is_urgent() && completed.all(|completion| completion.item.is_hot())
    }

    fn is_urgent(&self) -> bool {
        self.urgent.load(Ordering::Acquire)
    }

    /// True if an urgent outcome was added since the last call.
    pub(super) fn take_urgent(&self) -> bool {
        self.urgent.swap(false, Ordering::AcqRel)
    }
}
