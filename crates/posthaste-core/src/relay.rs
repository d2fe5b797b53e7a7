//! The engine: claims from a source, delivers to a sink, settles with the source.
//!
//! ```text
//!            capacity                   queue                     pile
//!  claimer ───────────► source.claim ──────► workers ─► sink ─────────► settler ─► source.settle
//!     ▲                                                                    │
//!     └────────────── freed capacity, retries due again, wake-ups ◄────────┘        renewer ─► source.renew
//! ```
//! Four kinds of tasks around one [`Flow`]. Nothing here knows what an item is.

mod backpressure;
mod claimer;
mod flow;
mod held;
mod hot;
mod meters;
mod queue;
mod renewer;
mod settler;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::{RetryPolicy, Sink, Source, heartbeat};
use flow::Flow;
pub(crate) use held::Held;
pub use hot::{HotDeadline, HotDoor, HotPermit};

/// Instants have an end: a wait beyond this is this.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Draws a number in `[0, 1)`: chance comes in from outside, so that a simulation can repeat a run.
pub type Jitter = Arc<dyn Fn() -> f64 + Send + Sync>;

/// How one relay runs.
#[derive(Clone)]
pub struct RelayOptions {
    /// How many calls of the sink run at once. With 0 nothing is delivered: for tests.
    pub workers: usize,
    /// How many items a call of the sink gets at most.
    pub chunk: usize,
    /// How many items are claimed at once at most.
    pub batch: usize,
    /// How many items may be claimed and not yet settled.
    pub max_in_flight: usize,
    /// How many bytes these may weigh; one item is always let through.
    pub max_bytes: usize,
    /// How often an idle source is asked without a wake-up.
    pub poll_interval: Duration,
    /// When a failed delivery is tried again.
    pub retry: RetryPolicy,
    /// How many outcomes are recorded at once at most.
    pub settle_batch: usize,
    /// How long outcomes gather while more are on their way.
    pub settle_linger: Duration,
    /// How long a stop waits for what is on its way.
    pub drain: Duration,
    /// What becomes of what waits when the relay stops.
    pub on_stop: OnStop,
    /// Where chance comes from.
    pub jitter: Jitter,
    /// What the names of its metrics begin with.
    pub metrics_prefix: String,
}

/// What becomes of items that are claimed but not yet given to the sink when the relay is asked to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnStop {
    /// Delivered as long as the drain time lasts, then released.
    Deliver,
    /// Released at once: somebody else may take them.
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
        }
    }
}

/// Moves claimed items from a [`Source`] to a [`Sink`] and settles each with exactly one [`Outcome`](crate::Outcome).
pub struct Relay<S: Source, K: Sink<Item = S::Item>> {
    sink: Arc<K>,
    flow: Arc<Flow<S>>,
}

impl<S: Source, K: Sink<Item = S::Item>> Relay<S, K> {
    /// `name` is what logs and metrics call it.
    pub fn new(name: impl Into<String>, source: Arc<S>, sink: Arc<K>, options: RelayOptions) -> Self {
        Self { sink, flow: Arc::new(Flow::new(name.into(), source, options)) }
    }

    /// A way in for at most `capacity` items at a time that are claimed already.
    pub fn hot_door(&self, capacity: usize) -> HotDoor<S::Item> {
        self.flow.hot_capacity.store(capacity, Ordering::Relaxed);
        HotDoor::new(self.flow.clone(), capacity)
    }

    /// Runs until `stop`, then drains. Dropping the future instead is a crash: what was claimed stays claimed until
    /// its lease ends.
    pub async fn run(self, stop: CancellationToken) {
        let flow = self.flow;
        let mut workers = JoinSet::new();
        for _ in 0..flow.options.workers {
            let sink = self.sink.clone();
            workers.spawn(supervise(flow.clone(), "deliver", CancellationToken::new(), move |flow, _| {
                work(flow, sink.clone())
            }));
        }
        let no_more_outcomes = CancellationToken::new();
        let mut keepers = JoinSet::new();
        keepers.spawn(supervise(flow.clone(), "settle", no_more_outcomes.clone(), settler::settle));
        let renewer = supervise(flow.clone(), "renew", no_more_outcomes.clone(), renewer::renew);
        match flow.source.renews_on_own_thread() {
            true => keepers.spawn_on(renewer, &heartbeat::runtime()),
            false => keepers.spawn(renewer),
        };

        supervise(flow.clone(), "claim", stop.clone(), claimer::claim).await;

        flow.refuse_hot();
        if flow.options.on_stop == OnStop::Release {
            flow.release_queued();
        }
        if timeout(flow.options.drain, flow.settled()).await.is_err() {
            tracing::warn!(relay = flow.name, held = flow.held_count(), "drain time is over: giving the rest back");
        }
        // From here on nothing that a delivery still says is heard: it is given back instead.
        flow.close();
        workers.shutdown().await;
        no_more_outcomes.cancel();
        // A fixed bound of its own: a database that hangs must not keep the process from ending.
        let last_words = async {
            // What is known is recorded, also what the settler has in its hands.
            while keepers.join_next().await.is_some() {}
            release_rest(&flow).await;
        };
        if timeout(Duration::from_secs(5), last_words).await.is_err() {
            tracing::warn!(relay = flow.name, "the store did not answer: claims end with their lease");
        }
    }
}

async fn work<S: Source, K: Sink<Item = S::Item>>(flow: Arc<Flow<S>>, sink: Arc<K>) {
    loop {
        let runs = flow.next_runs().await;
        let deliveries = Flow::start(&flow, runs);
        if deliveries.is_empty() {
            continue;
        }
        if catch(sink.deliver(deliveries)).await.is_err() {
            tracing::error!(relay = flow.name, "a delivery panicked; its items count as failed");
        }
    }
}

/// Runs a task of the relay until it ends by itself. A panic in it is a bug of ours or of a source: it is logged and
/// counted, and the task is started again after a pause, unless `end` has come.
async fn supervise<S, T>(
    flow: Arc<Flow<S>>,
    task: &'static str,
    end: CancellationToken,
    start: impl Fn(Arc<Flow<S>>, CancellationToken) -> T,
) where
    S: Source,
    T: Future<Output = ()>,
{
    let mut pause = Duration::from_millis(100);
    while catch(start(flow.clone(), end.clone())).await.is_err() {
        flow.meters.panicked(task);
        tracing::error!(relay = flow.name, task, "a task of the relay panicked; it is started again");
        tokio::select! {
            () = end.cancelled() => {}
            () = tokio::time::sleep(pause) => {}
        }
        pause = (pause * 2).min(Duration::from_secs(10));
    }
}

/// A panic of a sink is a failure of its items, not of the worker.
async fn catch(delivery: impl Future<Output = ()>) -> Result<(), ()> {
    AssertUnwindSafe(delivery).catch_unwind().await.map_err(|_| ())
}

async fn release_rest<S: Source>(flow: &Flow<S>) {
    let rest = flow.take_all_held();
    let rest: Vec<_> = rest.iter().map(|held| &held.claimed).collect();
    if !rest.is_empty()
        && let Err(error) = flow.source.release(&rest).await
    {
        tracing::warn!(
            relay = flow.name,
            error = error.chain(),
            "claims were not given back: they end with their lease"
        );
    }
    if let Err(error) = flow.source.close().await {
        tracing::warn!(relay = flow.name, error = error.chain(), "the source was not closed");
    }
}
