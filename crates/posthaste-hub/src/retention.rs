//! Removes data that is not needed any more, a batch at a time.
//!
//! Each kind of data has a task of its own. Several processes on one database may all run it: what one of them is
//! removing, the others leave to it.

use std::sync::Arc;
use std::time::Duration;

use chrono::Utc;
use futures_util::future::BoxFuture;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{
    BusInspector, DeadLetterStore, ExpiredRecords, HubOutbox, HubStores, QuarantineCount, QuarantineStore,
};
use posthaste_core::metric_names::{QUARANTINE_EXPIRED, RETENTION_LAST_RUN, RETENTION_REMOVED};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::settings::{CleanupSettings, Settings};
use crate::supervisor::Supervisor;

/// Data is removed this often during its retention, within these limits.
const ROUNDS: u32 = 10;
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);
/// The first run after a start does not wait longer.
const FIRST_PAUSE: Duration = Duration::from_secs(10);
/// How many rows one transaction removes. Other writes to a SQLite file wait meanwhile, and rows may be large.
const BATCH: usize = 200;

/// Starts one task for each kind of data that is removed.
pub(crate) fn start(stores: &HubStores, settings: &Settings, supervisor: &Supervisor) {
    let kept = &settings.retention;
    let kinds = [
        kept.outbox.map(|age| Expiring::outbox(stores.outbox.clone(), age)),
        kept.log.map(|age| Expiring::log(stores.inspector.clone(), age)),
        kept.quarantine.map(|age| Expiring::quarantine(stores.quarantine.clone(), age)),
        Expiring::dead_letters(stores.dead_letters.clone(), &settings.dlt.cleanup),
    ];
    for kind in kinds.into_iter().flatten() {
        kind.start(supervisor);
    }
}

/// Removes one batch, and returns how many there were; 0 if there are none left.
type RemoveBatch = Arc<dyn Fn() -> BoxFuture<'static, Result<u64, StoreError>> + Send + Sync>;

/// One kind of data that is removed when it is old.
#[derive(Clone)]
pub(crate) struct Expiring {
    /// Its name in metrics and logs.
    kind: &'static str,
    pause: Duration,
    remove_batch: RemoveBatch,
}

impl Expiring {
    /// The rows of an outbox table that were published longer than this ago.
    pub(crate) fn outbox(outbox: Arc<dyn HubOutbox>, age: Duration) -> Self {
        Self::new("outbox", pause_for(age), move || {
            let outbox = outbox.clone();
            Box::pin(async move { outbox.remove_done(age, BATCH).await })
        })
    }

    /// The records of the built-in bus that are older than this and that every group has done.
    fn log(inspector: Arc<dyn BusInspector>, age: Duration) -> Self {
        Self::new("log", pause_for(age), move || {
            let inspector = inspector.clone();
            Box::pin(async move { inspector.remove_expired(age).await })
        })
    }

    /// The records that were quarantined longer than this ago.
    fn quarantine(quarantine: Arc<dyn QuarantineStore>, age: Duration) -> Self {
        Self::new("quarantine", pause_for(age), move || {
            let quarantine = quarantine.clone();
            Box::pin(async move {
                let ExpiredRecords { removed, unhandled } = quarantine.remove_expired(age, BATCH).await?;
                unhandled.into_iter().for_each(report_unhandled);
                Ok(removed)
            })
        })
    }

    /// The dead letters that were delivered; `None` if they are kept. Each is kept for at least one interval, so that
    /// its result can be seen, and so that a record of it that is read twice does not become a dead letter again.
    fn dead_letters(dead_letters: Arc<dyn DeadLetterStore>, cleanup: &CleanupSettings) -> Option<Self> {
        let CleanupSettings { enabled, interval } = *cleanup;
        enabled.then(|| {
            Self::new("dlt", interval, move || {
                let dead_letters = dead_letters.clone();
                Box::pin(async move { dead_letters.remove_processed(interval, BATCH).await })
            })
        })
    }

    fn new(
        kind: &'static str,
        pause: Duration,
        remove_batch: impl Fn() -> BoxFuture<'static, Result<u64, StoreError>> + Send + Sync + 'static,
    ) -> Self {
        Self { kind, pause, remove_batch: Arc::new(remove_batch) }
    }

    /// Starts the task that removes it until the hub stops.
    fn start(self, supervisor: &Supervisor) {
        let task = format!("{}-retention", self.kind);
        self.start_as(task, supervisor);
    }

    /// [`start`](Self::start) with this name of the task.
    pub(crate) fn start_as(self, task: String, supervisor: &Supervisor) {
        let stopping = supervisor.stopping().clone();
        supervisor.spawn(task, move || self.clone().keep_removing(stopping.clone()));
    }

    async fn keep_removing(self, stopping: CancellationToken) {
        let mut pause = self.pause.min(FIRST_PAUSE);
        loop {
            tokio::select! {
                biased;
                () = stopping.cancelled() => return,
                () = sleep(pause) => {}
            }
            pause = self.pause;
            if let Err(error) = self.remove_all(&stopping).await {
                let error = error.chain();
                tracing::warn!(kind = self.kind, error, "failed to remove expired data; trying again later");
            }
        }
    }

    async fn remove_all(&self, stopping: &CancellationToken) -> Result<(), StoreError> {
        let counter = metrics::counter!(RETENTION_REMOVED, "kind" => self.kind);
        let mut removed = 0;
        loop {
            let batch = tokio::select! {
                biased;
                // A database that hangs must not delay the stop. What is not committed is rolled back.
                () = stopping.cancelled() => return Ok(()),
                batch = (self.remove_batch)() => batch?,
            };
            counter.increment(batch);
            removed += batch;
            if batch == 0 {
                break;
            }
        }
        metrics::gauge!(RETENTION_LAST_RUN, "kind" => self.kind).set(Utc::now().timestamp() as f64);
        if removed > 0 {
            tracing::debug!(kind = self.kind, removed, "removed expired data");
        }
        Ok(())
    }
}

fn pause_for(age: Duration) -> Duration {
    (age / ROUNDS).clamp(SHORTEST_PAUSE, LONGEST_PAUSE)
}

/// These records were never delivered, and nobody has decided that they need not be.
fn report_unhandled(QuarantineCount { group, topic, records }: QuarantineCount) {
    tracing::warn!(
        group,
        topic,
        records,
        "removed quarantined records that nobody replayed or discarded (retention.quarantine)"
    );
    metrics::counter!(QUARANTINE_EXPIRED, "group" => group, "topic" => topic).increment(records);
}
