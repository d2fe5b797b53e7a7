use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

use super::in_flight::InFlightItem;
use crate::lock;

/// Items of one key in the order of their delivery; an item without a key is a run by itself.
pub(super) type Run<T> = VecDeque<Arc<InFlightItem<T>>>;

/// How many hot runs are delivered before a waiting cold run.
const HOT_TO_COLD: u32 = 2;

/// Claimed runs that wait for a worker. The limits on items in flight bound its size.
pub(super) struct Queue<T> {
    waiting: Mutex<Waiting<T>>,
    ready: Notify,
}

struct Waiting<T> {
    /// From the hot queue: their writer has just committed them.
    hot: VecDeque<Run<T>>,
    /// Claimed from the source.
    cold: VecDeque<Run<T>>,
    /// How many hot runs were popped since the last cold one.
    hot_in_a_row: u32,
}

impl<T> Waiting<T> {
    fn len(&self) -> usize {
        self.hot.len() + self.cold.len()
    }

    /// Pops a hot run if there is one, but a waiting cold run after every two hot ones.
    fn next(&mut self) -> Option<Run<T>> {
        let is_cold_next = self.hot_in_a_row >= HOT_TO_COLD && !self.cold.is_empty();
        if !is_cold_next && let Some(run) = self.hot.pop_front() {
            self.hot_in_a_row = self.hot_in_a_row.saturating_add(1);
            return Some(run);
        }
        self.hot_in_a_row = 0;
        self.cold.pop_front()
    }
}

impl<T> Queue<T> {
    pub(super) fn new() -> Self {
        let waiting = Waiting { hot: VecDeque::new(), cold: VecDeque::new(), hot_in_a_row: 0 };
        Self { waiting: Mutex::new(waiting), ready: Notify::new() }
    }

    pub(super) fn push(&self, runs: impl IntoIterator<Item = Run<T>>) {
        lock(&self.waiting).cold.extend(runs);
        self.ready.notify_one();
    }

    pub(super) fn push_hot(&self, runs: impl IntoIterator<Item = Run<T>>) {
        lock(&self.waiting).hot.extend(runs);
        self.ready.notify_one();
    }

    /// Adds the rest of a run whose head was just delivered, before all other cold runs.
    pub(super) fn push_front(&self, run: Run<T>) {
        lock(&self.waiting).cold.push_front(run);
        self.ready.notify_one();
    }

    /// Gives back runs that were popped and cannot be started yet, to the front and in their order.
    pub(super) fn put_back(&self, runs: Vec<Run<T>>) {
        let mut waiting = lock(&self.waiting);
        for run in runs.into_iter().rev() {
            match run.front().is_some_and(|head| head.is_hot()) {
                true => waiting.hot.push_front(run),
                false => waiting.cold.push_front(run),
            }
        }
        drop(waiting);
        self.ready.notify_one();
    }

    /// Waits until there is a run, then pops at most `limit` runs.
    pub(super) async fn pop(&self, limit: usize) -> Vec<Run<T>> {
        loop {
            let notified = self.ready.notified();
            if let Some(popped) = self.try_pop(limit) {
                return popped;
            }
            notified.await;
        }
    }

    fn try_pop(&self, limit: usize) -> Option<Vec<Run<T>>> {
        let mut waiting = lock(&self.waiting);
        if waiting.len() == 0 {
            return None;
        }
        let count = limit.clamp(1, waiting.len());
        let popped = (0..count).map_while(|_| waiting.next()).collect();
        if waiting.len() > 0 {
            // One push wakes one worker; each worker that leaves runs in the queue wakes the next.
            self.ready.notify_one();
        }
        Some(popped)
    }

    /// Removes the runs whose head is revoked.
    pub(super) fn take_revoked(&self, is_revoked: impl Fn(&InFlightItem<T>) -> bool) -> Vec<Run<T>> {
        let mut waiting = lock(&self.waiting);
        let Waiting { hot, cold, .. } = &mut *waiting;
        let mut revoked = Vec::new();
        for queue in [hot, cold] {
            let (taken, kept): (VecDeque<_>, VecDeque<_>) =
                queue.drain(..).partition(|run| run.front().is_some_and(|head| is_revoked(head)));
            *queue = kept;
            revoked.extend(taken);
        }
        revoked
    }

    pub(super) fn take_all(&self) -> Vec<Run<T>> {
        let mut waiting = lock(&self.waiting);
        let hot = std::mem::take(&mut waiting.hot);
        hot.into_iter().chain(waiting.cold.drain(..)).collect()
    }

    /// How many runs wait, hot and cold.
    pub(super) fn depths(&self) -> (usize, usize) {
        let waiting = lock(&self.waiting);
        (waiting.hot.len(), waiting.cold.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Claimed;

    fn runs(names: &[&'static str]) -> Vec<Run<&'static str>> {
        names.iter().map(|name| VecDeque::from([Arc::new(InFlightItem::detached(Claimed::new(*name, 1, 0)))])).collect()
    }

    #[tokio::test]
    async fn two_hot_runs_are_popped_before_each_cold_run() {
        let queue = Queue::new();
        queue.push(runs(&["c1", "c2"]));
        queue.push_hot(runs(&["h1", "h2", "h3", "h4", "h5"]));
        let mut order = Vec::new();
        for _ in 0..7 {
            order.extend(queue.pop(1).await.iter().map(|run| run[0].claimed.item));
        }
        assert_eq!(order, ["h1", "h2", "c1", "h3", "h4", "c2", "h5"]);
    }
}
