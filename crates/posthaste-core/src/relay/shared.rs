use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use super::RelayOptions;
use super::backpressure::Backpressure;
use super::completions::{Completion, Completions};
use super::in_flight::{InFlight, InFlightItem, RelayClock};
use super::metrics::RelayMetrics;
use super::next_due::NextDue;
use super::queue::{Queue, Run};
use super::renewer::worth_renewing;
use crate::sink::Reporter;
use crate::{Claimed, Delivery, Disposition, FailureClass, Outcome, Source, decide};

/// The state that the tasks of one relay share.
pub(super) struct Shared<S: Source> {
    pub(super) name: String,
    pub(super) source: Arc<S>,
    pub(super) options: RelayOptions,
    pub(super) metrics: RelayMetrics,
    pub(super) clock: RelayClock,
    /// Claimed runs that wait for a worker.
    pub(super) queue: Queue<S::Item>,
    pub(super) in_flight: InFlight<S::Item>,
    pub(super) completions: Completions<S::Item>,
    pub(super) backpressure: Backpressure,
    pub(super) next_due: NextDue,
    /// Notified when items arrive with little of their lease left: they may need a renewal before the next regular one.
    pub(super) renew_soon: Notify,
    /// When the last renewal that the source answered was sent.
    renewed_at: AtomicU64,
    /// Notified after each renewal that the source answered.
    pub(super) renewed: Notify,
    /// The drain time is over: outcomes that are reported now are ignored, and their items are released.
    closed: AtomicBool,
}

impl<S: Source> Shared<S> {
    pub(super) fn new(name: String, source: Arc<S>, options: RelayOptions) -> Self {
        // Two batches keep the settler busy: one is being settled while the next one gathers.
        let in_delivery = options.workers.max(1) * options.chunk.max(1);
        let max_unsettled = options.settle_batch.max(1) * 2 + in_delivery;
        Self {
            metrics: RelayMetrics::new(&options.metrics_prefix, &name, options.shared_label.as_deref()),
            name,
            source,
            clock: RelayClock::start(),
            queue: Queue::new(),
            in_flight: InFlight::new(&options),
            completions: Completions::new(&options),
            backpressure: Backpressure::new(max_unsettled),
            next_due: NextDue::default(),
            renew_soon: Notify::new(),
            renewed_at: AtomicU64::new(0),
            renewed: Notify::new(),
            closed: AtomicBool::new(false),
            options,
        }
    }

    /// Queues claimed items, to be delivered before `deadline`.
    pub(super) fn accept(&self, items: Vec<Claimed<S::Item>>, deadline: u64) {
        self.metrics.claimed(items.len());
        self.queue.push(self.in_flight.add(items, deadline));
        self.report_depths();
        self.renew_if_old(deadline);
    }

    /// A slow claim, or a transaction that was slow to commit, brings items with little of their lease left.
    pub(super) fn renew_if_old(&self, deadline: u64) {
        if deadline < worth_renewing(self.clock.now(), self.source.lease()) {
            self.renew_soon.notify_one();
        }
    }

    /// The source has answered a renewal of all leases, which was sent at this time.
    pub(super) fn renewal_answered(&self, sent_at: u64) {
        self.renewed_at.store(sent_at, Ordering::Relaxed);
        self.renewed.notify_waiters();
    }

    /// True if leases should have been renewed long ago. The renewer does it three times in a lease.
    pub(super) fn is_renewal_overdue(&self) -> bool {
        let age = self.clock.now().saturating_sub(self.renewed_at.load(Ordering::Relaxed));
        age > self.source.lease().as_micros() as u64 * 2 / 3
    }

    /// Waits until new deliveries may start, then pops at most one chunk of runs from the queue.
    pub(super) async fn next_runs(&self) -> Vec<Run<S::Item>> {
        loop {
            let runs = self.queue.pop(self.options.chunk).await;
            if self.backpressure.allows_start(self.clock.now()) {
                return runs;
            }
            // They wait in the queue, where a stop finds them.
            self.queue.put_back(runs);
            self.backpressure.eased(|| self.clock.now()).await;
        }
    }

    /// Turns the heads of runs into deliveries. A run whose lease has ended is released: another process may have
    /// claimed it.
    pub(super) fn start(shared: &Arc<Self>, runs: Vec<Run<S::Item>>) -> Vec<Delivery<S::Item>> {
        let now = shared.clock.now();
        let mut deliveries = Vec::with_capacity(runs.len());
        for mut run in runs {
            match run.pop_front() {
                Some(head) if shared.may_start(&head, now) => {
                    deliveries.push(Delivery::new(head, run, shared.clone() as Arc<dyn Reporter<S::Item>>));
                }
                Some(head) => {
                    let is_lost = !head.may_start(now);
                    run.push_front(head);
                    if is_lost {
                        shared.metrics.lost(run.len());
                        tracing::warn!(relay = shared.name, items = run.len(), "not delivered: the lease ended first");
                    }
                    shared.completions.release(run);
                }
                None => {}
            }
        }
        deliveries
    }

    fn may_start(&self, item: &InFlightItem<S::Item>, now: u64) -> bool {
        item.may_start(now) && self.source.may_start(&item.claimed)
    }

    /// Releases the waiting items that the source has revoked.
    pub(super) fn release_revoked(&self) {
        let is_revoked = |item: &InFlightItem<S::Item>| !self.source.may_start(&item.claimed);
        self.completions.release(self.queue.take_revoked(is_revoked).into_iter().flatten());
    }

    pub(super) fn release_queued(&self) {
        self.completions.release(self.queue.take_all().into_iter().flatten());
    }

    /// True if waiting a moment would make the next batch of settlements larger.
    pub(super) fn expects_more_completions(&self) -> bool {
        self.completions.has_room() && self.in_flight.len() > self.completions.len()
    }

    /// When this many outcomes of hot items wait, they are settled without waiting for more.
    pub(super) fn enough_completions(&self) -> usize {
        self.options.settle_batch.min(self.in_flight.hot_capacity() / 2)
    }

    /// Removes items that are settled or released.
    pub(super) fn remove<'a>(&self, items: impl IntoIterator<Item = &'a Arc<InFlightItem<S::Item>>>) {
        self.in_flight.remove(items);
        self.report_depths();
        self.metrics.unsettled(self.backpressure.unsettled());
    }

    pub(super) fn take_all_in_flight(&self) -> Vec<Arc<InFlightItem<S::Item>>> {
        let all = self.in_flight.take_all();
        self.metrics.depths(0, (0, 0));
        self.metrics.unsettled(0);
        all
    }

    pub(super) fn report_depths(&self) {
        self.metrics.depths(self.in_flight.len(), self.queue.depths());
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }
}

impl<S: Source> Reporter<S::Item> for Shared<S> {
    fn report(&self, item: Arc<InFlightItem<S::Item>>, rest: Run<S::Item>, outcome: Outcome, took: Duration) {
        if self.closed.load(Ordering::Acquire) {
            return;
        }
        let jitter = (self.options.jitter)();
        let claimed = &item.claimed;
        let is_made = !matches!(&outcome, Outcome::Failed(failure) if failure.class == FailureClass::Outage);
        let disposition = decide(&self.options.retry, claimed.attempt, claimed.budget, outcome, jitter);
        // The rest of a run is delivered only after a head that is done.
        let (next, released) = match disposition == Disposition::Done {
            true => (rest, Run::new()),
            false => (Run::new(), rest),
        };
        if is_made {
            self.backpressure.add_unsettled();
        }
        let completion = Completion { item, disposition, took, is_made, refusals: 0, lock_waits: 0 };
        self.completions.push(completion, released, self.enough_completions());
        if !next.is_empty() {
            self.queue.push_front(next);
        }
    }

    fn may_start(&self, item: &InFlightItem<S::Item>) -> bool {
        Self::may_start(self, item, self.clock.now())
    }
}
