use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::Instant;

use super::backpressure::Backpressure;
use super::held::{Held, RelayClock};
use super::hot::Entrance;
use super::meters::Meters;
use super::queue::{Queue, Run};
use super::renewer::worth_renewing;
use super::{LONGEST_WAIT, RelayOptions};
use crate::sink::Reporter;
use crate::{Claimed, Delivery, Disposition, Outcome, Source, decide};

/// What the tasks of one relay share.
pub(super) struct Flow<S: Source> {
    pub(super) name: String,
    pub(super) source: Arc<S>,
    pub(super) options: RelayOptions,
    pub(super) meters: Meters,
    pub(super) queue: Queue<S::Item>,
    pub(super) clock: RelayClock,
    held: Mutex<HeldTable<S::Item>>,
    pile: Mutex<Pile<S::Item>>,
    /// Something was put on the pile.
    pub(super) piled: Notify,
    /// Something on the pile is not to wait for more.
    pub(super) urgent: AtomicBool,
    /// Something was settled or given back: there is room.
    pub(super) freed: Notify,
    /// Something was taken in whose lease is well under way: it may end before the renewer's next turn.
    pub(super) aged: Notify,
    /// A retry will be due earlier than the claimer thinks.
    pub(super) due_moved: Notify,
    next_due: Mutex<Option<Instant>>,
    next_ticket: AtomicU64,
    pub(super) backpressure: Backpressure,
    closed: AtomicBool,
    /// How many hot items may be held at once.
    pub(super) hot_capacity: AtomicUsize,
}

struct HeldTable<T> {
    items: HashMap<u64, Arc<Held<T>>>,
    bytes: usize,
    /// How many of them came in hot: those have a bound of their own.
    hot: usize,
    /// Whether hot items are still taken in.
    open_to_hot: bool,
}

/// An item whose fate is decided but not yet recorded.
pub(super) struct Decided<T> {
    pub(super) held: Arc<Held<T>>,
    pub(super) disposition: Disposition,
    pub(super) took: Duration,
    /// How often the store refused it for good.
    pub(super) refusals: u32,
    /// How often its row was locked by somebody else.
    pub(super) waits: u32,
}

/// What waits to be recorded.
pub(super) struct Pile<T> {
    pub(super) decided: Vec<Decided<T>>,
    pub(super) released: Vec<Arc<Held<T>>>,
}

impl<T> Pile<T> {
    fn new() -> Self {
        Self { decided: Vec::new(), released: Vec::new() }
    }
}

impl<S: Source> Flow<S> {
    pub(super) fn new(name: String, source: Arc<S>, options: RelayOptions) -> Self {
        // Two batches keep the settler busy: one is being recorded while the next one gathers.
        let on_their_way = options.workers.max(1) * options.chunk.max(1);
        let backpressure = Backpressure::new(options.settle_batch.max(1) * 2 + on_their_way);
        Self {
            meters: Meters::new(&options.metrics_prefix, &name),
            name,
            source,
            options,
            queue: Queue::new(),
            clock: RelayClock::start(),
            held: Mutex::new(HeldTable { items: HashMap::new(), bytes: 0, hot: 0, open_to_hot: true }),
            pile: Mutex::new(Pile::new()),
            piled: Notify::new(),
            urgent: AtomicBool::new(false),
            freed: Notify::new(),
            aged: Notify::new(),
            due_moved: Notify::new(),
            next_due: Mutex::new(None),
            next_ticket: AtomicU64::new(1),
            backpressure,
            closed: AtomicBool::new(false),
            hot_capacity: AtomicUsize::new(usize::MAX),
        }
    }

    /// How many more items may be claimed now.
    pub(super) fn room(&self) -> usize {
        let held = self.lock_held();
        match held.bytes >= self.options.max_bytes {
            true => 0,
            false => self.options.max_in_flight.max(1).saturating_sub(held.items.len() - held.hot),
        }
    }

    /// Takes in what was claimed, to be delivered before `deadline`.
    pub(super) fn accept(&self, items: Vec<Claimed<S::Item>>, deadline: u64) {
        self.meters.claimed(items.len());
        let mut runs: Vec<Run<S::Item>> = Vec::with_capacity(items.len());
        let mut run_of_key: HashMap<Arc<str>, usize> = HashMap::new();
        let mut table = self.lock_held();
        let claim = self.next_ticket.load(Ordering::Relaxed);
        for claimed in items {
            let ticket = self.next_ticket.fetch_add(1, Ordering::Relaxed);
            table.bytes += claimed.bytes;
            let key = claimed.key.clone();
            let held = Arc::new(Held::new(claimed, ticket, deadline, None).of_claim(claim));
            table.items.insert(ticket, held.clone());
            match key.as_ref().and_then(|key| run_of_key.get(key)) {
                Some(&run) => runs[run].push_back(held),
                None => {
                    if let Some(key) = key {
                        run_of_key.insert(key, runs.len());
                    }
                    runs.push(VecDeque::from([held]));
                }
            }
        }
        let in_flight = table.items.len();
        drop(table);
        self.queue.push(runs);
        self.meters.level(in_flight, self.queue.depths());
        self.renew_what_is_old(deadline);
    }

    /// A claim whose answer took long, and a transaction that took long to commit, bring items with little time left.
    fn renew_what_is_old(&self, deadline: u64) {
        if deadline < worth_renewing(self.clock.now(), self.source.lease()) {
            self.aged.notify_one();
        }
    }

    /// From now on nothing hot is taken in.
    pub(super) fn refuse_hot(&self) {
        self.lock_held().open_to_hot = false;
    }

    /// Waits until new deliveries may start, then takes at most one chunk of runs from the queue.
    pub(super) async fn next_runs(&self) -> Vec<Run<S::Item>> {
        loop {
            let runs = self.queue.pop(self.options.chunk).await;
            if self.backpressure.allows_start(self.clock.now()) {
                return runs;
            }
            // The queue keeps them meanwhile, so that a stop finds them there.
            self.queue.put_back(runs);
            self.backpressure.eased(|| self.clock.now()).await;
        }
    }

    /// Turns the heads of runs into deliveries. What is past its lease is dropped instead: somebody else may have it.
    pub(super) fn start(flow: &Arc<Self>, runs: Vec<Run<S::Item>>) -> Vec<Delivery<S::Item>> {
        let now = flow.clock.now();
        let mut deliveries = Vec::with_capacity(runs.len());
        for mut run in runs {
            match run.pop_front() {
                Some(head) if head.may_start(now) => {
                    deliveries.push(Delivery::new(head, run, flow.clone() as Arc<dyn Reporter<S::Item>>));
                }
                Some(head) => {
                    run.push_front(head);
                    flow.meters.lost(run.len());
                    tracing::warn!(relay = flow.name, items = run.len(), "not delivered: the lease ended first");
                    flow.pile_released(run);
                }
                None => {}
            }
        }
        deliveries
    }

    /// An item turned out to be somebody else's by now: what its claim brought of the same key must not be started behind
    /// it, for it is that one's turn again.
    pub(super) fn revoke_run(&self, lost: &Held<S::Item>) {
        let Some(key) = &lost.claimed.key else { return };
        for held in self.lock_held().items.values() {
            if held.claim == lost.claim && held.claimed.key.as_ref() == Some(key) {
                held.revoke();
            }
        }
    }

    pub(super) fn release_queued(&self) {
        for run in self.queue.take_all() {
            self.pile_released(run);
        }
    }

    fn pile_released(&self, run: Run<S::Item>) {
        self.lock_pile().released.extend(run);
        self.piled.notify_one();
    }

    /// Takes at most one batch from the pile.
    pub(super) fn take_pile(&self) -> Pile<S::Item> {
        let mut pile = self.lock_pile();
        let count = pile.decided.len().min(self.options.settle_batch.max(1));
        let later = pile.decided.split_off(count);
        let decided = std::mem::replace(&mut pile.decided, later);
        Pile { decided, released: std::mem::take(&mut pile.released) }
    }

    /// Whether waiting a moment would make the next batch larger.
    pub(super) fn more_on_the_way(&self) -> bool {
        let piled = self.piled_count();
        piled < self.options.settle_batch && self.held_count() > piled
    }

    /// Whether everything on the pile came in hot, so that nobody waits for it to be recorded: neither what stands behind
    /// it in the store, nor who would claim in its place, nor who wants to come in, as long as the hot door is half open.
    pub(super) fn nobody_waits(&self) -> bool {
        let pile = self.lock_pile();
        let is_short = (1..self.enough()).contains(&pile.decided.len()) && pile.released.is_empty();
        is_short && !self.urgent.load(Ordering::Acquire) && pile.decided.iter().all(|decided| decided.held.is_hot())
    }

    /// How many outcomes are not worth waiting for more.
    fn enough(&self) -> usize {
        self.options.settle_batch.min(self.hot_capacity.load(Ordering::Relaxed) / 2)
    }

    pub(super) fn piled_count(&self) -> usize {
        self.lock_pile().decided.len()
    }

    pub(super) fn forget<'a>(&self, settled: impl IntoIterator<Item = &'a Arc<Held<S::Item>>>) {
        let mut table = self.lock_held();
        for held in settled {
            if table.items.remove(&held.ticket).is_some() {
                table.bytes -= held.claimed.bytes;
                table.hot -= usize::from(held.is_hot());
            }
        }
        self.meters.level(table.items.len(), self.queue.depths());
        drop(table);
        self.meters.unsettled(self.backpressure.unsettled());
        self.freed.notify_waiters();
    }

    /// Waits until nothing is held any more.
    pub(super) async fn settled(&self) {
        loop {
            let freed = self.freed.notified();
            if self.held_count() == 0 {
                return;
            }
            freed.await;
        }
    }

    pub(super) fn held_count(&self) -> usize {
        self.lock_held().items.len()
    }

    pub(super) fn all_held(&self) -> Vec<Arc<Held<S::Item>>> {
        self.lock_held().items.values().cloned().collect()
    }

    pub(super) fn take_all_held(&self) -> Vec<Arc<Held<S::Item>>> {
        let mut table = self.lock_held();
        table.bytes = 0;
        table.hot = 0;
        self.meters.level(0, (0, 0));
        self.meters.unsettled(0);
        table.items.drain().map(|(_, held)| held).collect()
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Something will be due again after `wait`.
    pub(super) fn expect_due(&self, wait: Duration) {
        let due = Instant::now() + wait.min(LONGEST_WAIT);
        let mut next = self.next_due.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if next.is_none_or(|next| due < next) {
            *next = Some(due);
            self.due_moved.notify_one();
        }
    }

    pub(super) fn expected_due(&self) -> Option<Instant> {
        *self.next_due.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The claimer is about to look at what is due by now.
    pub(super) fn forget_due(&self, now: Instant) {
        let mut next = self.next_due.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if next.is_some_and(|next| next <= now) {
            *next = None;
        }
    }

    fn lock_held(&self) -> MutexGuard<'_, HeldTable<S::Item>> {
        self.held.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn lock_pile(&self) -> MutexGuard<'_, Pile<S::Item>> {
        self.pile.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl<S: Source> Entrance<S::Item> for Flow<S> {
    fn now(&self) -> u64 {
        self.clock.now()
    }

    fn lease(&self) -> Duration {
        self.source.lease()
    }

    fn enter(
        &self,
        items: Vec<(Claimed<S::Item>, OwnedSemaphorePermit)>,
        deadline: u64,
    ) -> Result<(), Vec<Claimed<S::Item>>> {
        let mut table = self.lock_held();
        if !table.open_to_hot {
            return Err(items.into_iter().map(|(claimed, _)| claimed).collect());
        }
        self.meters.hot(items.len());
        let mut runs = Vec::with_capacity(items.len());
        for (claimed, permit) in items {
            let ticket = self.next_ticket.fetch_add(1, Ordering::Relaxed);
            table.bytes += claimed.bytes;
            table.hot += 1;
            let held = Arc::new(Held::new(claimed, ticket, deadline, Some(permit)));
            table.items.insert(ticket, held.clone());
            runs.push(VecDeque::from([held]));
        }
        let in_flight = table.items.len();
        drop(table);
        self.queue.push_hot(runs);
        self.meters.level(in_flight, self.queue.depths());
        self.renew_what_is_old(deadline);
        Ok(())
    }

    fn is_open(&self) -> bool {
        self.lock_held().open_to_hot
    }

    fn is_heavy(&self) -> bool {
        self.lock_held().bytes >= self.options.max_bytes
    }

    fn meters(&self) -> &Meters {
        &self.meters
    }
}

impl<S: Source> Reporter<S::Item> for Flow<S> {
    fn report(&self, held: Arc<Held<S::Item>>, rest: Run<S::Item>, outcome: Outcome, took: Duration) {
        if self.closed.load(Ordering::Acquire) {
            return;
        }
        let jitter = (self.options.jitter)();
        let claimed = &held.claimed;
        let disposition = decide(&self.options.retry, claimed.attempt, claimed.budget, outcome, jitter);
        let goes_on = disposition == Disposition::Done;
        let is_urgent = claimed.urgent;
        if is_urgent {
            self.urgent.store(true, Ordering::Release);
        }
        self.backpressure.add_unsettled();
        let mut pile = self.lock_pile();
        pile.decided.push(Decided { held, disposition, took, refusals: 0, waits: 0 });
        let enough = pile.decided.len() == 1 || pile.decided.len() >= self.enough() || is_urgent;
        if !rest.is_empty() && !goes_on {
            pile.released.extend(rest.iter().cloned());
        }
        drop(pile);
        if enough {
            self.piled.notify_one();
        }
        if !rest.is_empty() && goes_on {
            self.queue.push_front(rest);
        }
    }
}
