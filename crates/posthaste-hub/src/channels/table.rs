use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthaste_core::hub_store::HubOutbox;
use posthaste_core::metric_names::{DISPATCH_DEAD, prefixed};
use posthaste_core::outbox::OutboxItem;
use posthaste_core::{OnStop, RelayOptions, RetryPolicy, Sink, StoreError, lock};
use tokio::time::Instant;

use super::gate::{Gate, Gated};
use super::sinks::{AllTopicsSink, TopicSink, refused};
use super::{CHANNEL_DISCOVERY, Channels, relay_name};

/// `search` finds rows of other programs with one query for all channels, and wakes their relays. A relay polls only in
/// case a wake-up is lost. The interval is long, because a thousand idle channels must not use CPU.
const POLL_INTERVAL: Duration = Duration::from_secs(15 * 60);

/// What one channel may hold in memory. There may be hundreds of channels.
const MAX_BYTES: usize = 16 * 1024 * 1024;
/// How many event types without a channel one search handles together, and for how long.
const NEW_TYPES: usize = 100;
const NEW_TYPES_TIME: Duration = Duration::from_secs(1);

/// The relays of one outbox table: one per event type, or one for all types if the table is ordered.
#[derive(Clone)]
pub(crate) struct TableChannels(Arc<Inner>);

struct Inner {
    channels: Channels,
    outbox: Arc<dyn HubOutbox>,
    /// The name of the source; `None` for the table of the hub.
    source: Option<Arc<str>>,
    batch_size: usize,
    poll_interval: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_down: bool,
    /// The running relays by event type. The relay of an ordered table has the empty name.
    gates: HashMap<String, Arc<Gate>>,
    /// When the channels with an interval of their own were woken last.
    woken: HashMap<String, Instant>,
    /// For how long the first due row of each type has been due.
    lags: Vec<(String, Duration)>,
    /// Of an ordered table: for how long the oldest due row that waits for no other row has been due.
    unblocked: Option<Duration>,
    /// How many searches have ended.
    searches: u64,
}

impl TableChannels {
    pub(crate) fn new(
        channels: Channels,
        outbox: Arc<dyn HubOutbox>,
        source: Option<Arc<str>>,
        batch_size: usize,
        poll_interval: Duration,
    ) -> Self {
        let table =
            Self(Arc::new(Inner { channels, outbox, source, batch_size, poll_interval, state: Mutex::default() }));
        if table.0.outbox.is_ordered() {
            table.open("");
        }
        table
    }

    /// Starts the relay of a type whose channel is recorded, unless it runs.
    pub(crate) fn open(&self, event_type: &str) {
        let inner = &self.0;
        let event_type = if inner.outbox.is_ordered() { "" } else { event_type };
        let mut state = lock(&inner.state);
        if state.gates.contains_key(event_type) {
            return;
        }
        let gate = Arc::new(Gate::new(true, inner.channels.start_of(event_type)));
        gate.set_table_down(state.is_down);
        state.gates.insert(event_type.to_owned(), gate.clone());
        drop(state);
        // A pause from now on finds the gate. One before has been recorded.
        gate.set_paused(inner.channels.is_held(event_type));
        let (outbox, channels) = (inner.outbox.clone(), inner.channels.clone());
        match event_type {
            "" => self.run("", gate.clone(), AllTopicsSink::new(channels, gate, outbox)),
            event_type => {
                let (publisher, event_type) = (channels.publisher(event_type), event_type.to_owned());
                self.run(&event_type.clone(), gate.clone(), TopicSink { publisher, gate, outbox, event_type });
            }
        }
    }

    fn run(&self, event_type: &str, gate: Arc<Gate>, sink: impl Sink<Item = OutboxItem>) {
        let inner = &self.0;
        let settings = inner.channels.settings();
        let outbox = &settings.outbox;
        let batch = settings.channel(event_type).and_then(|channel| channel.batch_size).unwrap_or(inner.batch_size);
        let options = RelayOptions {
            workers: 2,
            chunk: batch,
            batch,
            max_in_flight: 2 * batch,
            max_bytes: MAX_BYTES,
            poll_interval: if event_type.is_empty() { inner.poll_interval } else { POLL_INTERVAL },
            retry: RetryPolicy::Exponential {
                base: outbox.backoff_base,
                max: outbox.backoff_max,
                max_attempts: Some(outbox.max_attempts),
            },
            drain: outbox.drain,
            on_stop: OnStop::Release,
            // Each type has one label, however many sources there are.
            shared_label: inner.source.as_ref().map(|_| relay_name(None, event_type)),
            ..RelayOptions::default()
        };
        let gated = {
            let (outbox, event_type) = (inner.outbox.clone(), event_type.to_owned());
            move || {
                // A relay that is restarted has lost its probe.
                gate.probed_nothing();
                Gated { source: outbox.source(&event_type), gate: gate.clone() }
            }
        };
        let first = gated();
        let again = move || {
            let source = gated();
            Box::pin(async move { Ok(source) }) as _
        };
        let name = relay_name(inner.source.as_deref(), event_type);
        inner.channels.relays().start(name, first, Box::new(again), sink, options);
    }

    /// Makes the relay of this type claim now.
    pub(crate) fn wake(&self, event_type: &str) {
        self.0.outbox.wake(event_type);
    }

    /// Looks for rows of other programs, opens the channels of new types, and wakes the channels that have due rows.
    pub(crate) async fn search(&self) -> Result<(), StoreError> {
        let lags = self.0.outbox.oldest_due_by_type().await?;
        let due: Vec<String> = lags.iter().map(|(event_type, _)| event_type.clone()).collect();
        lock(&self.0.state).lags = lags;
        if self.0.outbox.is_ordered() {
            let unblocked = self.0.outbox.oldest_unblocked().await?;
            lock(&self.0.state).unblocked = unblocked;
            // Its relay opens the channels.
            if !due.is_empty() {
                self.wake("");
            }
        } else {
            due.iter().filter(|event_type| self.is_wake_due(event_type)).for_each(|event_type| self.wake(event_type));
            let new: Vec<String> = due.into_iter().filter(|event_type| !self.is_open(event_type)).collect();
            self.add_types(new).await?;
        }
        lock(&self.0.state).searches += 1;
        Ok(())
    }

    fn is_open(&self, event_type: &str) -> bool {
        lock(&self.0.state).gates.contains_key(event_type)
    }

    /// Opens the channels of these types. The rows of a type that cannot have a channel become dead, with the reason:
    /// operators see such rows and can replay them. Many bad types take several searches, so that they do not hold up
    /// the others.
    async fn add_types(&self, new: Vec<String>) -> Result<(), StoreError> {
        let (started, mut dead, mut reason) = (Instant::now(), 0, None);
        for types in new.chunks(NEW_TYPES) {
            let owned = self.0.channels.own(types.to_vec()).await?;
            for (event_type, owned) in types.iter().zip(owned) {
                match owned {
                    Ok(()) => self.open(event_type),
                    Err(error) => {
                        dead += self.0.outbox.give_up(event_type, &refused(&error), self.0.batch_size).await?;
                        reason.get_or_insert(error);
                    }
                }
            }
            if started.elapsed() > NEW_TYPES_TIME {
                break;
            }
        }
        if let Some(error) = reason.filter(|_| dead > 0) {
            // These types have no relay that could count them.
            let counter = prefixed(&RelayOptions::default().metrics_prefix, DISPATCH_DEAD);
            metrics::counter!(counter, "relay" => CHANNEL_DISCOVERY).increment(dead as u64);
            let source = self.0.source.as_deref();
            tracing::error!(source, rows = dead, %error, "outbox rows became dead: their event types have no channel");
        }
        Ok(())
    }

    /// A channel with an interval of its own is woken that often.
    fn is_wake_due(&self, event_type: &str) -> bool {
        let settings = self.0.channels.settings();
        let Some(interval) = settings.channel(event_type).and_then(|channel| channel.interval) else { return true };
        let (mut state, now) = (lock(&self.0.state), Instant::now());
        if state.woken.get(event_type).is_some_and(|last| now - *last < interval) {
            return false;
        }
        state.woken.insert(event_type.to_owned(), now);
        true
    }

    /// Pauses or resumes the relay of this type.
    pub(super) fn set_held(&self, event_type: &str, is_held: bool) {
        let gate = lock(&self.0.state).gates.get(event_type).cloned();
        if gate.is_some_and(|gate| gate.set_paused(is_held)) && !is_held {
            self.wake(event_type);
        }
    }

    /// Nothing is claimed while the table cannot be reached. When it can, every relay claims at once.
    pub(crate) fn set_down(&self, is_down: bool) {
        let mut state = lock(&self.0.state);
        if std::mem::replace(&mut state.is_down, is_down) == is_down {
            return;
        }
        state.gates.values().for_each(|gate| gate.set_table_down(is_down));
        let open: Vec<String> = state.gates.keys().cloned().collect();
        drop(state);
        if !is_down {
            open.iter().for_each(|event_type| self.wake(event_type));
        }
    }

    /// For how long the first due row of each type had been due at the last search.
    pub(crate) fn lags(&self) -> Vec<(String, Duration)> {
        lock(&self.0.state).lags.clone()
    }

    /// The relays whose oldest event had been due for longer than this at the last search.
    pub(crate) fn late_relays(&self, age: Duration) -> Vec<String> {
        let state = lock(&self.0.state);
        if self.0.outbox.is_ordered() {
            // Events behind a dead or paused one of their aggregate wait rightly.
            let is_late = state.unblocked.is_some_and(|unblocked| unblocked > age);
            return is_late.then(|| self.relay_name("")).into_iter().collect();
        }
        let (channels, lags) = (&self.0.channels, state.lags.iter());
        let late = lags.filter(|(event_type, lag)| *lag > age && state.gates.contains_key(event_type));
        // Events of a paused channel wait because an operator or the configuration says so.
        let late = late.filter(|(event_type, _)| !channels.is_held(event_type));
        late.map(|(event_type, _)| self.relay_name(event_type)).collect()
    }

    /// How many searches have ended.
    pub(crate) fn searches(&self) -> u64 {
        lock(&self.0.state).searches
    }

    /// Why the relay of this type does not publish, if its bus or registry is away.
    pub(super) fn failure(&self, event_type: &str) -> Option<String> {
        let state = lock(&self.0.state);
        state.gates.get(event_type).or_else(|| state.gates.get(""))?.failure()
    }

    /// The name of the relay that publishes events of this type.
    pub(crate) fn relay_name(&self, event_type: &str) -> String {
        relay_name(self.0.source.as_deref(), if self.0.outbox.is_ordered() { "" } else { event_type })
    }

    pub(crate) fn outbox(&self) -> &Arc<dyn HubOutbox> {
        &self.0.outbox
    }

    pub(super) fn is_of_hub(&self) -> bool {
        self.0.source.is_none()
    }
}
