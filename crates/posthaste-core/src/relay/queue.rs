use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;

use super::Held;

/// Items of one key in the order of their delivery; an item without a key is a run by itself.
pub(super) type Run<T> = VecDeque<Arc<Held<T>>>;

/// Claimed runs that wait for a worker. Bounded by the relay's capacity, not by itself.
pub(super) struct Queue<T> {
    runs: Mutex<VecDeque<Run<T>>>,
    ready: Notify,
}

impl<T> Queue<T> {
    pub(super) fn new() -> Self {
        Self { runs: Mutex::new(VecDeque::new()), ready: Notify::new() }
    }

    pub(super) fn push(&self, runs: impl IntoIterator<Item = Run<T>>) {
        self.lock().extend(runs);
        self.ready.notify_one();
    }

    /// The rest of a run whose head has just been delivered goes on before anything else.
    pub(super) fn push_front(&self, run: Run<T>) {
        self.lock().push_front(run);
        self.ready.notify_one();
    }

    /// Waits until there is something, then takes at most `limit` runs.
    pub(super) async fn pop(&self, limit: usize) -> Vec<Run<T>> {
        loop {
            let notified = self.ready.notified();
            if let Some(taken) = self.try_pop(limit) {
                return taken;
            }
            notified.await;
        }
    }

    fn try_pop(&self, limit: usize) -> Option<Vec<Run<T>>> {
        let mut runs = self.lock();
        if runs.is_empty() {
            return None;
        }
        let count = limit.clamp(1, runs.len());
        let taken = runs.drain(..count).collect();
        if !runs.is_empty() {
            // One push wakes one worker; each worker that leaves something wakes the next.
            self.ready.notify_one();
        }
        Some(taken)
    }

    pub(super) fn take_all(&self) -> Vec<Run<T>> {
        self.lock().drain(..).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Run<T>>> {
        self.runs.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
