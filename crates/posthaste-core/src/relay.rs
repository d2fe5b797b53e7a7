//! The engine: claims from a source, delivers to a sink, settles with the source.
//!
//! ```text
//!              room                     queue                 completions
//!  claimer ───────────► source.claim ──────► workers ─► sink ─────────► settler ─► source.settle
//!     ▲                                                                    │
//!     └────────────── freed capacity, retries due again, wake-ups ◄────────┘        renewer ─► source.renew
//! ```
//! Four kinds of tasks share one [`Shared`]: the items in flight, and the completion buffer. The relay does not look
//! into its items.

mod backpressure;
mod claimer;
mod completions;
mod hot_queue;
mod in_flight;
mod metrics;
mod next_due;
mod queue;
mod renewer;
mod settler;
mod shared;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::{Backoff, RetryPolicy, Sink, Source, heartbeat};
pub use hot_queue::{HotDeadline, HotPermit, HotQueue};
pub(crate) use in_flight::InFlightItem;
use shared::Shared;

/// Longer waits are cut to this, because adding them to an `Instant` would overflow.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Draws a number in `[0, 1)`. Randomness is a parameter, so that a simulation can repeat a run.
pub type Jitter = Arc<dyn Fn() -> f64 + Send + Sync>;

/// How one relay runs.
#[derive(Clone)]
pub struct RelayOptions {
    /// How many calls of the sink run at once. With 0 nothing is delivered: for tests.
    pub workers: usize,
    /// How many items one call of the sink gets at most.
    pub chunk: usize,
    /// How many items are claimed at once at most.
    pub batch: usize,
    /// How many items may be claimed and not yet settled.
    pub max_in_flight: usize,
    /// How many bytes the items in flight may have; one item is always allowed.
    pub max_bytes: usize,
    /// How often an idle source is polled without a wake-up.
    pub poll_interval: Duration,
    /// When a failed delivery is tried again.
    pub retry: RetryPolicy,
    /// How many outcomes are settled at once at most.
    pub settle_batch: usize,
    /// How long the settler waits for more outcomes while items are in flight.
    pub settle_linger: Duration,
    /// How long a stop waits for the items in flight.
    pub drain: Duration,
    /// What happens to items that wait for a worker when the relay stops.
    pub on_stop: OnStop,
    /// The source of randomness.
    pub jitter: Jitter,
    /// The prefix of the names of its metrics.
    pub metrics_prefix: String,
    /// The label of its metrics, if it is not the name of the relay. Several relays may share it, so it has no gauges.
    pub shared_label: Option<String>,
}

/// What happens to items that are claimed but not yet given to the sink when the relay is asked to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnStop {
    /// They are delivered while the drain time lasts, then released.
    Deliver,
    /// They are released at once, so that another process may claim them.
    Release,
}

impl Default for RelayOptions {
    fn default() -> Self {
        Self {
            workers: 4,
            chunk: 1,
            batch: 500,
            max_in_flight: 2_000,
            max_bytes: 64 * 1024 * 1024,
            poll_interval: Duration::from_secs(5),
            retry: RetryPolicy::default(),
            settle_batch: 500,
            settle_linger: Duration::from_millis(2),
            drain: Duration::from_secs(5),
            on_stop: OnStop::Release,
            jitter: Arc::new(fastrand::f64),
            metrics_prefix: "posthaste".to_owned(),
            shared_label: None,
        }
    }
}

/// Moves claimed items from a [`Source`] to a [`Sink`] and settles each with exactly one [`Outcome`](crate::Outcome).
pub struct Relay<S: Source, K: Sink<Item = S::Item>> {
    sink: Arc<K>,
    shared: Arc<Shared<S>>,
}

impl<S: Source, K: Sink<Item = S::Item>> Relay<S, K> {
    /// `name` identifies the relay in logs and metrics.
    pub fn new(name: impl Into<String>, source: Arc<S>, sink: Arc<K>, options: RelayOptions) -> Self {
        Self { sink, shared: Arc::new(Shared::new(name.into(), source, options)) }
    }

    /// The hot queue of this relay, for at most `capacity` items at a time.
    pub fn hot_queue(&self, capacity: usize) -> HotQueue<S::Item> {
        HotQueue::new(self.shared.clone(), capacity)
    }

    /// Runs until `stop`, then drains. Dropping the future instead is a crash: claimed items stay claimed until their
    /// leases end.
    pub async fn run(self, stop: CancellationToken) {
        let shared = self.shared;
        let mut workers = JoinSet::new();
        for _ in 0..shared.options.workers {
            let sink = self.sink.clone();
            workers.spawn(supervise(shared.clone(), "deliver", CancellationToken::new(), move |shared, _| {
                work(shared, sink.clone())
            }));
        }
        let no_more_outcomes = CancellationToken::new();
        let mut background = JoinSet::new();
        background.spawn(supervise(shared.clone(), "settle", no_more_outcomes.clone(), settler::settle));
        let renewer = supervise(shared.clone(), "renew", no_more_outcomes.clone(), renewer::renew);
        match shared.source.renews_on_own_thread() {
            true => background.spawn_on(renewer, &heartbeat::runtime()),
            false => background.spawn(renewer),
        };

        supervise(shared.clone(), "claim", stop.clone(), claimer::claim).await;

        shared.in_flight.refuse_hot();
        if shared.options.on_stop == OnStop::Release {
            shared.release_queued();
        }
        if timeout(shared.options.drain, shared.in_flight.emptied()).await.is_err() {
            tracing::warn!(
                relay = shared.name,
                in_flight = shared.in_flight.len(),
                "the drain time is over: releasing the items that are still in flight"
            );
        }
        // From here on the outcome of a delivery is ignored, and its item is released.
        shared.close();
        workers.shutdown().await;
        no_more_outcomes.cancel();
        // A fixed bound of its own: a database that hangs must not keep the process from ending.
        let finish = async {
            // The settler settles all known outcomes before it ends, so only then is the rest released.
            while background.join_next().await.is_some() {}
            release_rest(&shared).await;
        };
        if timeout(Duration::from_secs(5), finish).await.is_err() {
            tracing::warn!(
                relay = shared.name,
                "the store did not respond: the items stay claimed until their leases end"
            );
        }
    }
}

async fn work<S: Source, K: Sink<Item = S::Item>>(shared: Arc<Shared<S>>, sink: Arc<K>) {
    loop {
        let runs = shared.next_runs().await;
        let deliveries = Shared::start(&shared, runs);
        if deliveries.is_empty() {
            continue;
        }
        if catch(sink.deliver(deliveries)).await.is_err() {
            tracing::error!(relay = shared.name, "a delivery panicked; its items count as failed");
        }
    }
}

/// Runs a task of the relay until it ends by itself. A panic in it is a bug of the relay or of a source: it is logged
/// and counted, and the task is restarted after a pause, or at once if `end` is cancelled.
async fn supervise<S, T>(
    shared: Arc<Shared<S>>,
    task: &'static str,
    end: CancellationToken,
    start: impl Fn(Arc<Shared<S>>, CancellationToken) -> T,
) where
    S: Source,
    T: Future<Output = ()>,
{
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
    while catch(start(shared.clone(), end.clone())).await.is_err() {
        shared.metrics.panicked(task);
        tracing::error!(relay = shared.name, task, "a task of the relay panicked; restarting it");
        tokio::select! {
            () = end.cancelled() => {}
            () = tokio::time::sleep(backoff.next_pause()) => {}
        }
    }
}

/// A panic of a sink is a failure of its items, not of the worker.
async fn catch(delivery: impl Future<Output = ()>) -> Result<(), ()> {
    AssertUnwindSafe(delivery).catch_unwind().await.map_err(|_| ())
}

async fn release_rest<S: Source>(shared: &Shared<S>) {
    let rest = shared.take_all_in_flight();
    let rest: Vec<_> = rest.iter().map(|item| &item.claimed).collect();
    if !rest.is_empty()
        && let Err(error) = shared.source.release(&rest).await
    {
        tracing::warn!(
            relay = shared.name,
            error = error.chain(),
            "failed to release claims: the items stay claimed until their leases end"
        );
    }
    if let Err(error) = shared.source.close().await {
        tracing::warn!(relay = shared.name, error = error.chain(), "failed to close the source");
    }
}
