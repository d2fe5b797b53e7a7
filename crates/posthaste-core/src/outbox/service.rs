use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::hook::WriterHook;
use super::write::{WriteError, write_all};
use super::{
    DeadFilter, InTransaction, Listeners, Mode, OutboxBuilder, OutboxRow, Pool, Retention, Settings, Store, Table,
    Transaction,
};
use crate::trace::TraceContext;
use crate::wakeup::{LISTEN_PAUSE, NOTIFY_PAUSE, NOTIFY_TIMEOUT, PROBES};
use crate::{IntoEvent, Relay, Signal, StoreError, Wakeup, lock, metric_names};

/// The outbox of a service. It writes events in the service's transactions, and calls its listeners after their commit.
///
/// Clones are the same outbox. [`close`](Self::close) ends it in order; if the last clone is dropped without `close`,
/// the outbox ends in the background.
pub struct Outbox<S: Store>(Arc<Service<S>>);

struct Service<S: Store> {
    table: Table<S>,
    hook: Option<Arc<dyn WriterHook>>,
    trace: Option<Arc<dyn TraceContext>>,
    retention: Option<Retention>,
    stop_purge: CancellationToken,
    stop_relay: CancellationToken,
    stop_hints: CancellationToken,
    tasks: Mutex<Tasks>,
    _stop_all: [DropGuard; 3],
}

#[derive(Default)]
struct Tasks {
    purge: JoinSet<()>,
    relay: JoinSet<()>,
    hints: JoinSet<()>,
}

impl<S: Store> Clone for Outbox<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: Store> Outbox<S> {
    /// Starts to configure an outbox in the database of this pool.
    #[allow(clippy::new_ret_no_self)]
    pub fn new<P: Pool<S>>(pool: P) -> OutboxBuilder<P, S> {
        OutboxBuilder::new(pool)
    }

    pub(super) fn start(
        table: Table<S>,
        settings: Settings,
        listeners: Listeners,
        hook: Option<Arc<dyn WriterHook>>,
        trace: Option<Arc<dyn TraceContext>>,
    ) -> Self {
        let [stop_purge, stop_relay, stop_hints] = [(); 3].map(|()| CancellationToken::new());
        let mut tasks = Tasks::default();
        let is_reader = settings.mode != Mode::WriterOnly;
        if is_reader {
            let sink = listeners.into_sink(settings.unroutable, trace.clone(), &settings.metrics_prefix);
            let source = table.dispatcher_source().skip_recent(settings.skip_recent);
            let poll_interval = settings.effective_poll_interval(table.store().notifier().is_some());
            let options = settings.relay_options(poll_interval);
            let relay = Relay::new("dispatcher", Arc::new(source), Arc::new(sink), options);
            if settings.mode.is_hot() {
                table.set_hot_queue(relay.hot_queue(settings.hot_queue));
            }
            if settings.workers == 0 {
                tracing::warn!(table = %settings.table, "the outbox has no workers: nothing will be delivered");
            }
            tasks.relay.spawn(relay.run(stop_relay.clone()));
            tasks.hints.spawn(until(stop_hints.clone(), listen(table.clone())));
            let lag = metrics::gauge!(metric_names::prefixed(&settings.metrics_prefix, metric_names::LAG_OLDEST), "relay" => "dispatcher");
            tasks.hints.spawn(until(stop_hints.clone(), watch_lag(table.clone(), lag, poll_interval)));
        }
        tasks.hints.spawn(until(stop_hints.clone(), notify_when_signalled(table.clone())));
        if let Some(retention) = settings.purge.clone() {
            let (table, stop) = (table.clone(), stop_purge.clone());
            tasks.purge.spawn(async move { retention.keep(table.store(), stop).await });
        }
        let _stop_all = [&stop_purge, &stop_relay, &stop_hints].map(|stop| stop.clone().drop_guard());
        Self(Arc::new(Service {
            table,
            hook,
            trace,
            retention: settings.purge,
            stop_purge,
            stop_relay,
            stop_hints,
            tasks: Mutex::new(tasks),
            _stop_all,
        }))
    }

    /// Begins a transaction of the service whose end this outbox sees: events that are written in it go straight from
    /// its commit to the listeners of this process.
    pub async fn begin(&self) -> Result<Transaction<S>, StoreError> {
        Transaction::begin(&self.0.table, self.0.hook.clone()).await
    }

    /// Writes an event in a transaction: one that [`begin`](Self::begin) began, or one of sqlx. The event is delivered
    /// after the commit, and never if the transaction does not commit. Returns its id, or `None` if the writer's hook
    /// suppressed it.
    ///
    /// The outbox cannot see the commit of a transaction of sqlx: the dispatcher polls a few times within the next
    /// moments, and at once after [`committed`](Self::committed).
    pub async fn write(
        &self,
        transaction: &mut impl InTransaction<S>,
        event: impl IntoEvent,
    ) -> Result<Option<String>, WriteError> {
        Ok(self.write_all(transaction, [event]).await?.pop())
    }

    /// Writes events in a transaction, in this order, in one statement if they are not too many. Returns their ids. See
    /// [`write`](Self::write).
    pub async fn write_all(
        &self,
        transaction: &mut impl InTransaction<S>,
        events: impl IntoIterator<Item = impl IntoEvent>,
    ) -> Result<Vec<String>, WriteError> {
        let trace = self.0.trace.as_ref().map(|trace| trace.current()).unwrap_or_default();
        let events = events.into_iter().map(|event| Ok(event.into_event()?.carrying(&trace)));
        let events = events.collect::<Result<Vec<_>, WriteError>>()?;
        write_all(&self.0.table, self.0.hook.as_ref(), transaction, events).await
    }

    /// Call this after the commit of a transaction of sqlx with events: the dispatcher claims at once.
    pub fn committed(&self) {
        self.0.table.committed();
    }

    /// The row of one event, whatever its status.
    pub async fn find(&self, event_id: &str) -> Result<Option<OutboxRow>, StoreError> {
        self.0.table.store().find(event_id).await
    }

    /// The dead events.
    pub fn dead(&self) -> DeadEvents<'_, S> {
        DeadEvents(&self.0.table)
    }

    /// Deletes now the rows that are old enough for the retention. Returns how many.
    pub async fn purge(&self) -> Result<u64, StoreError> {
        match &self.0.retention {
            Some(retention) => retention.enforce(self.0.table.store()).await,
            None => Ok(0),
        }
    }

    /// The table of this outbox, for code that builds on it.
    pub fn table(&self) -> &Table<S> {
        &self.0.table
    }

    /// Ends purging, then stops claiming, delivers claimed events while the drain time lasts, settles the known
    /// outcomes and releases the rest. Writing still works; another process will deliver those events. A second call
    /// returns at once.
    pub async fn close(&self) {
        let mut tasks = std::mem::take(&mut *lock(&self.0.tasks));
        let was_reading = !tasks.relay.is_empty();
        for (stop, tasks) in [
            (&self.0.stop_purge, &mut tasks.purge),
            (&self.0.stop_relay, &mut tasks.relay),
            (&self.0.stop_hints, &mut tasks.hints),
        ] {
            stop.cancel();
            while let Some(ended) = tasks.join_next().await {
                if let Err(error) = ended {
                    tracing::error!(%error, "a task of the outbox failed");
                }
            }
        }
        if was_reading {
            // Other processes may claim the released events now.
            notify_others(&self.0.table).await;
        }
    }
}

impl Drop for Tasks {
    /// A dropped outbox ends in order all the same: its tasks are asked to stop, and not aborted.
    fn drop(&mut self) {
        self.purge.detach_all();
        self.relay.detach_all();
        self.hints.detach_all();
    }
}

/// The dead events of one outbox, and the operations on them.
pub struct DeadEvents<'a, S: Store>(&'a Table<S>);

impl<S: Store> DeadEvents<'_, S> {
    /// Lists dead events, oldest first.
    pub async fn list(&self, filter: &DeadFilter, limit: usize) -> Result<Vec<OutboxRow>, StoreError> {
        self.0.store().dead(filter, limit).await
    }

    /// Counts dead events.
    pub async fn count(&self, filter: &DeadFilter) -> Result<u64, StoreError> {
        self.0.store().count_dead(filter).await
    }

    /// Makes one dead event NEW again, as if it had never been tried. True if it was dead.
    pub async fn replay(&self, event_id: &str) -> Result<bool, StoreError> {
        let filter = DeadFilter { event_id: Some(event_id.to_owned()), ..DeadFilter::all() };
        let (replayed, _) = self.0.store().replay(&filter, i64::MIN, 1).await?;
        self.0.committed();
        Ok(replayed > 0)
    }

    /// Makes all events NEW again that were dead when the call began, `batch` at a time, each batch in a transaction of
    /// its own. Returns how many.
    pub async fn replay_all(&self, filter: &DeadFilter, batch: std::num::NonZeroUsize) -> Result<u64, StoreError> {
        let (mut replayed, mut after) = (0, i64::MIN);
        loop {
            let (count, last) = self.0.store().replay(filter, after, batch.get()).await?;
            replayed += count;
            after = last;
            self.0.committed();
            if count < batch.get() as u64 {
                return Ok(replayed);
            }
        }
    }

    /// Deletes one dead event for good. True if it was dead.
    pub async fn discard(&self, event_id: &str) -> Result<bool, StoreError> {
        let discarded = self.0.store().discard(event_id).await?;
        self.0.committed();
        Ok(discarded)
    }
}

async fn until(stop: CancellationToken, task: impl Future<Output = ()>) {
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = task => {}
    }
}

/// Measures from time to time how long the oldest due event has been waiting. If that fails, the gauge keeps its value.
async fn watch_lag<S: Store>(table: Table<S>, lag: metrics::Gauge, every: Duration) {
    loop {
        match table.store().oldest_due().await {
            Ok(age) => lag.set(age.unwrap_or_default().as_millis() as f64),
            Err(error) => tracing::debug!(error = error.chain(), "failed to measure the lag"),
        }
        sleep(every).await;
    }
}

/// Notifies other processes of commits, not more often than is useful. A lost notification costs only time: they poll.
async fn notify_when_signalled<S: Store>(table: Table<S>) {
    loop {
        let waits = match table.notify_others().signalled().await {
            Signal::Now => &[Duration::ZERO][..],
            Signal::Soon => &PROBES[..],
        };
        for wait in waits {
            sleep(*wait).await;
            // In single-node mode the owner is the only reader, and it knows of its own writes.
            if !table.ownership().is_ours() {
                notify_others(&table).await;
            }
        }
        sleep(NOTIFY_PAUSE).await;
    }
}

async fn notify_others<S: Store>(table: &Table<S>) {
    let Some(notifier) = table.store().notifier() else { return };
    match timeout(NOTIFY_TIMEOUT, notifier.notify()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::debug!(error = error.chain(), "failed to notify other processes: they poll");
        }
        Err(_) => tracing::debug!("notifying other processes took too long: they poll"),
    }
}

/// Wakes every source of this process when another process notifies.
async fn listen<S: Store>(table: Table<S>) {
    let Some(notifier) = table.store().notifier() else { return };
    let wakeup = Wakeup::default();
    loop {
        let listening = notifier.listen(wakeup.clone());
        tokio::pin!(listening);
        loop {
            tokio::select! {
                biased;
                _ = wakeup.signalled() => table.wake_all(),
                ended = &mut listening => {
                    if let Err(error) = ended {
                        tracing::debug!(error = error.chain(), "failed to listen for notifications: polling goes on");
                    }
                    break;
                }
            }
        }
        sleep(LISTEN_PAUSE).await;
    }
}
