use std::collections::BTreeMap;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthaste_core::{Relay, RelayOptions, Sink, Source, StoreError, lock};
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::attempt_log::{AttemptLog, Described};
use crate::supervisor::Supervisor;
use crate::watched::{Counts, RelayProgress, Watched};

/// Makes a new source for a relay after a panic.
pub(crate) type MakeSource<S> = Box<dyn Fn() -> MadeSource<S> + Send + Sync>;
type MadeSource<S> = Pin<Box<dyn Future<Output = Result<S, StoreError>> + Send>>;

/// How long a relay may take to stop after its drain time, before it is dropped.
const STOP_MARGIN: Duration = Duration::from_secs(10);

/// The relays that run in this process, each a task of the supervisor.
#[derive(Clone, Default)]
pub(crate) struct Relays {
    supervisor: Supervisor,
    running: Arc<Mutex<BTreeMap<String, RunningRelay>>>,
    log: Arc<AttemptLog>,
}

/// What the hub knows of a relay that runs.
#[derive(Clone, Default)]
struct RunningRelay {
    progress: Arc<RelayProgress>,
    /// Asks the relay to restart.
    restart: Arc<Notify>,
}

impl Relays {
    /// Starts a relay on the source `first`. After a panic or [`restart`](Self::restart), the relay continues with a source
    /// from `make`.
    pub(crate) fn start<S, K>(
        &self,
        name: impl Into<String>,
        first: S,
        make: MakeSource<S>,
        sink: K,
        options: RelayOptions,
    ) where
        S: Source<Item: Described>,
        K: Sink<Item = S::Item>,
    {
        let name: Arc<str> = name.into().into();
        let running = RunningRelay::default();
        lock(&self.running).insert(name.to_string(), running.clone());
        let task = Arc::new(RelayTask {
            name: name.clone(),
            make,
            sink: Arc::new(sink),
            options,
            running,
            log: self.log.clone(),
            first: Mutex::new(Some(first)),
            last: Mutex::new(None),
        });
        let stop = self.stopping().clone();
        self.supervisor.spawn(name, move || task.clone().run(stop.clone()));
    }

    pub(crate) fn supervisor(&self) -> &Supervisor {
        &self.supervisor
    }

    pub(crate) fn stopping(&self) -> &CancellationToken {
        self.supervisor.stopping()
    }

    /// Stops this relay and starts it again. Does nothing if no such relay runs here.
    pub(crate) fn restart(&self, relay: &str) -> bool {
        let running = lock(&self.running);
        let found = running.get(relay);
        found.inspect(|running| running.restart.notify_one()).is_some()
    }

    /// The progress of this relay.
    pub(crate) fn progress(&self, relay: &str) -> Counts {
        lock(&self.running).get(relay).map(|running| running.progress.counts()).unwrap_or_default()
    }

    /// The relays whose last attempt failed because of a dependency, and that failure.
    pub(crate) fn held_back(&self) -> BTreeMap<String, String> {
        let running = lock(&self.running);
        running.iter().filter_map(|(name, running)| Some((name.clone(), running.progress.held_back()?))).collect()
    }
}

/// A relay that can be started again.
struct RelayTask<S: Source, K> {
    name: Arc<str>,
    make: MakeSource<S>,
    sink: Arc<K>,
    options: RelayOptions,
    running: RunningRelay,
    log: Arc<AttemptLog>,
    /// The source of the first start.
    first: Mutex<Option<S>>,
    /// The source of the last start.
    last: Mutex<Option<Arc<Watched<S>>>>,
}

impl<S, K> RelayTask<S, K>
where
    S: Source<Item: Described>,
    K: Sink<Item = S::Item>,
{
    async fn run(self: Arc<Self>, stop: CancellationToken) {
        match self.next_source().await {
            Ok(source) => {
                let relay = Relay::new(self.name.to_string(), source, self.sink.clone(), self.options.clone());
                self.run_until_restart(relay, stop).await;
            }
            Err(error) => {
                tracing::error!(relay = &*self.name, error = error.chain(), "failed to make the source of a relay")
            }
        }
    }

    /// Runs the relay until the hub stops or somebody asks for a restart. A relay that is stuck may not be able to stop:
    /// it is dropped then, and its claims end with their leases.
    async fn run_until_restart(&self, relay: Relay<Watched<S>, K>, stop: CancellationToken) {
        let stop_this_run = stop.child_token();
        let mut run = pin!(relay.run(stop_this_run.clone()));
        tokio::select! {
            biased;
            () = run.as_mut() => return,
            () = self.running.restart.notified() => {}
        }
        stop_this_run.cancel();
        if timeout(self.options.drain + STOP_MARGIN, run).await.is_err() {
            tracing::warn!(relay = &*self.name, "a relay did not stop: its claims end with their leases");
        }
    }

    async fn next_source(&self) -> Result<Arc<Watched<S>>, StoreError> {
        let last = lock(&self.last).take();
        if let Some(last) = last
            && let Err(error) = last.close().await
        {
            // The leases of the old source will expire.
            tracing::warn!(relay = &*self.name, error = error.chain(), "failed to close the source of a failed relay");
        }
        let first = lock(&self.first).take();
        let source = match first {
            Some(source) => source,
            None => (self.make)().await?,
        };
        let watched = Watched::new(self.name.clone(), source, self.running.progress.clone(), self.log.clone());
        let watched = Arc::new(watched);
        *lock(&self.last) = Some(watched.clone());
        Ok(watched)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;
    use posthaste_core::{Claim, Claimed, Delivery, Settled, Settlement, Wakeup};

    use super::*;

    struct Item;

    impl Described for Item {
        fn event_id(&self) -> &str {
            "event"
        }

        fn event_type(&self) -> &str {
            "type"
        }

        fn subscription(&self) -> Option<&str> {
            None
        }

        fn endpoint(&self) -> &str {
            ""
        }

        fn attempt(&self, counted: u32) -> u32 {
            counted
        }
    }

    /// A source whose first claim of the test panics or never returns. Siblings share the count of claims.
    #[derive(Default)]
    struct Fragile {
        first_claim_hangs: bool,
        claims: Arc<AtomicUsize>,
        closed: Arc<AtomicUsize>,
        wakeup: Wakeup,
    }

    impl Fragile {
        /// Another source that shares the counters.
        fn sibling(&self) -> Self {
            Self {
                first_claim_hangs: self.first_claim_hangs,
                claims: self.claims.clone(),
                closed: self.closed.clone(),
                wakeup: Wakeup::default(),
            }
        }
    }

    #[async_trait]
    impl Source for Fragile {
        type Item = Item;

        async fn claim(&self, _: usize) -> Result<Claim<Item>, StoreError> {
            let is_first = self.claims.fetch_add(1, Ordering::Relaxed) == 0;
            if is_first && self.first_claim_hangs {
                return std::future::pending().await;
            }
            assert!(!is_first, "the first claim is broken");
            Ok(Claim { items: vec![Claimed::new(Item, 1, 1)], next_due: Some(Duration::from_secs(60)) })
        }

        async fn settle(&self, settlements: &[Settlement<'_, Item>]) -> Result<Vec<Settled>, StoreError> {
            Ok(vec![Settled::Applied; settlements.len()])
        }

        async fn renew(&self, claimed: &[&Claimed<Item>]) -> Result<Vec<Settled>, StoreError> {
            Ok(vec![Settled::Applied; claimed.len()])
        }

        async fn release(&self, _: &[&Claimed<Item>]) -> Result<(), StoreError> {
            Ok(())
        }

        async fn close(&self) -> Result<(), StoreError> {
            self.closed.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }

        fn lease(&self) -> Duration {
            Duration::from_secs(30)
        }

        fn renews_on_own_thread(&self) -> bool {
            false
        }

        fn wakeup(&self) -> &Wakeup {
            &self.wakeup
        }

        fn may_start(&self, _: &Claimed<Item>) -> bool {
            true
        }

        async fn revoked(&self) {
            std::future::pending().await
        }
    }

    struct Arrivals(Arc<Notify>);

    #[async_trait]
    impl Sink for Arrivals {
        type Item = Item;

        async fn deliver(&self, batch: Vec<Delivery<Item>>) {
            batch.into_iter().for_each(|delivery| delivery.report(()));
            self.0.notify_one();
        }
    }

    fn again(source: &Fragile) -> MakeSource<Fragile> {
        let source = source.sibling();
        Box::new(move || {
            let next = source.sibling();
            Box::pin(async move { Ok(next) })
        })
    }

    #[tokio::test(start_paused = true)]
    async fn a_relay_restarts_after_a_panic_of_its_claim() {
        let (relays, arrived, source) = (Relays::default(), Arc::new(Notify::new()), Fragile::default());
        let make = again(&source);
        relays.start("relay", source, make, Arrivals(arrived.clone()), RelayOptions::default());
        tokio::time::timeout(Duration::from_secs(60), arrived.notified()).await.unwrap();
        relays.supervisor().stop().await;
        assert!(relays.progress("relay").completed > 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_restart_replaces_a_relay_that_cannot_stop() {
        let (relays, arrived) = (Relays::default(), Arc::new(Notify::new()));
        let source = Fragile { first_claim_hangs: true, ..Fragile::default() };
        let (claims, make) = (source.claims.clone(), again(&source));
        relays.start("relay", source, make, Arrivals(arrived.clone()), RelayOptions::default());
        while claims.load(Ordering::Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        relays.restart("another relay");
        relays.restart("relay");
        tokio::time::timeout(Duration::from_secs(60), arrived.notified()).await.unwrap();
        relays.supervisor().stop().await;
        assert!(relays.progress("relay").completed > 0);
    }

    #[tokio::test]
    async fn the_source_of_a_failed_relay_is_closed_before_the_next_one_is_made() {
        let source = Fragile::default();
        let (closed, make) = (source.closed.clone(), again(&source));
        let task = RelayTask {
            name: "relay".into(),
            make,
            sink: Arc::new(Arrivals(Arc::default())),
            options: RelayOptions::default(),
            running: RunningRelay::default(),
            log: Arc::default(),
            first: Mutex::new(Some(source)),
            last: Mutex::new(None),
        };
        task.next_source().await.unwrap();
        assert_eq!(closed.load(Ordering::Relaxed), 0);
        task.next_source().await.unwrap();
        assert_eq!(closed.load(Ordering::Relaxed), 1);
    }
}
