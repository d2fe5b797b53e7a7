//! One relay per event type, from the outbox tables to the topic of that type.

mod gate;
mod sinks;
mod table;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthaste_core::bus::Bus;
use posthaste_core::hub_store::{Admission, ChannelStore, HubOutbox, HubStores, Ingested, Refusal};
use posthaste_core::{Event, FaultKind, StoreError, lock};
use tokio::time::{Instant, sleep, timeout};

pub(crate) use sinks::Publisher;
pub(crate) use table::TableChannels;

use crate::ingest::{StoreEvents, StoreResults};
use crate::relays::Relays;
use crate::settings::Settings;
use crate::topics::TopicNames;

/// How often a server looks which channels operators have paused at other servers.
const REFRESH_INTERVAL: Duration = Duration::from_secs(2);
/// How long one look into the database may take.
pub(crate) const LOOK_TIMEOUT: Duration = Duration::from_secs(10);

/// The channels of all outbox tables: that of the hub, and those of the sources. A new event type gets a new channel.
///
/// Which type owns which topic is recorded in the database, in the transaction of the type's first event. This process
/// only starts the relays of recorded types.
#[derive(Clone)]
pub struct Channels(Arc<Inner>);

struct Inner {
    outbox: Arc<dyn HubOutbox>,
    store: Arc<dyn ChannelStore>,
    bus: Arc<dyn Bus>,
    /// The buses of channels that do not use that of the hub, by event type.
    own_buses: HashMap<String, Arc<dyn Bus>>,
    topics: TopicNames,
    relays: Relays,
    settings: Settings,
    started: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The recorded channels, and since when this process knows that an operator paused them.
    recorded: HashMap<String, Option<Instant>>,
    /// The tables that this process reads, that of the hub first.
    tables: Vec<TableChannels>,
}

const RELAY_PREFIX: &str = "channel:";
/// The task that searches the hub's own table, in logs, metrics and readiness.
pub(crate) const CHANNEL_DISCOVERY: &str = "channel-discovery";

/// The name of a channel's relay in logs, metrics and readiness. The empty type stands for all types.
pub(crate) fn relay_name(source: Option<&str>, event_type: &str) -> String {
    let event_type = if event_type.is_empty() { "*" } else { event_type };
    match source {
        None => format!("{RELAY_PREFIX}{event_type}"),
        Some(source) => format!("{RELAY_PREFIX}{source}/{event_type}"),
    }
}

/// A database that does not answer must not stop the search for ever.
async fn in_time<T>(asking: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    let late = |late| StoreError::new("look into the outbox", FaultKind::Transient, late);
    timeout(LOOK_TIMEOUT, asking).await.map_err(late)?
}

/// Why an event type has no channel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    #[error(
        "event type {refused:?} is not 1 to 128 characters of A-Z a-z 0-9 . _ -, so it cannot be part of a topic name"
    )]
    BadName { refused: String },
    #[error(
        "event type {refused:?} differs from {existing:?} only in '.' and '_', which topic names cannot tell apart"
    )]
    Collision { refused: String, existing: String },
    #[error("event type {refused:?} exceeds the limit of {limit} channels: raise bus.max_channels or use known types")]
    TooMany { refused: String, limit: usize },
}

impl ChannelError {
    fn of(event_type: &str, refusal: Refusal) -> Self {
        let refused = event_type.to_owned();
        match refusal {
            Refusal::TopicTaken { owner } => Self::Collision { refused, existing: owner },
            Refusal::Full { limit } => Self::TooMany { refused, limit },
        }
    }
}

/// What an operator sees of a channel.
pub(crate) struct ChannelStatus {
    pub(crate) event_type: String,
    pub(crate) topic: Arc<str>,
    pub(crate) is_enabled: bool,
    pub(crate) is_paused: bool,
    /// Why its bus or registry does not accept events.
    pub(crate) failure: Option<String>,
    /// For how long its oldest event has been due, over all tables.
    pub(crate) lag: Duration,
}

impl Channels {
    pub(crate) fn new(
        stores: &HubStores,
        bus: Arc<dyn Bus>,
        own_buses: HashMap<String, Arc<dyn Bus>>,
        topics: TopicNames,
        relays: Relays,
        settings: &Settings,
    ) -> Self {
        Self(Arc::new(Inner {
            outbox: stores.outbox.clone(),
            store: stores.channels.clone(),
            bus,
            own_buses,
            topics,
            relays,
            settings: settings.clone(),
            started: Instant::now(),
            state: Mutex::default(),
        }))
    }

    /// Starts the relays of the hub's own table, and searches it for rows of other programs until the hub stops.
    pub(crate) async fn start(&self) -> Result<(), StoreError> {
        let outbox = &self.0.settings.outbox;
        let table = self.add_table(self.0.outbox.clone(), None, outbox.batch_size, outbox.poll_interval);
        self.refresh().await?;
        let channels = self.clone();
        self.0.relays.supervisor().spawn(CHANNEL_DISCOVERY, move || channels.clone().discover(table.clone()));
        Ok(())
    }

    /// Adds a table whose events this process publishes.
    pub(crate) fn add_table(
        &self,
        outbox: Arc<dyn HubOutbox>,
        source: Option<Arc<str>>,
        batch_size: usize,
        poll_interval: Duration,
    ) -> TableChannels {
        let table = TableChannels::new(self.clone(), outbox, source, batch_size, poll_interval);
        lock(&self.0.state).tables.push(table.clone());
        table
    }

    /// Refuses a type that cannot be part of a topic's name.
    pub(crate) fn check_name(event_type: &str) -> Result<(), ChannelError> {
        match posthaste_api::is_event_type(event_type) {
            true => Ok(()),
            false => Err(ChannelError::BadName { refused: event_type.chars().take(200).collect() }),
        }
    }

    /// Stores events whose types were checked by [`check_name`](Self::check_name), and wakes their channels.
    pub(crate) async fn store(&self, events: Vec<Arc<Event>>, atomic: bool) -> Result<StoreResults, StoreError> {
        let stored = self.0.store.ingest(events.clone(), atomic).await;
        let admissions = stored.inspect_err(|error| {
            if error.kind() != FaultKind::Permanent {
                let bytes = events.iter().map(|event| event.payload().as_bytes().len()).sum();
                self.0.relays.supervisor().health().write_failed(bytes);
            }
        })?;
        let is_stored = |admission: &Admission| *admission == Admission::Ingested(Ingested::Stored);
        let stored = events.iter().zip(&admissions).filter(|(_, admission)| is_stored(admission));
        for event_type in stored.map(|(event, _)| event.event_type()).collect::<BTreeSet<_>>() {
            self.remember(event_type);
            if let Some(table) = self.own_table() {
                table.open(event_type);
                table.wake(event_type);
            }
        }
        let result = |(event, admission): (&Arc<Event>, Admission)| match admission {
            Admission::Ingested(ingested) => Ok(ingested),
            Admission::Refused(refusal) => Err(ChannelError::of(event.event_type(), refusal)),
        };
        Ok(events.iter().zip(admissions).map(result).collect())
    }

    /// [`store`](Self::store), for the ingest.
    pub(crate) fn into_store(self) -> StoreEvents {
        Arc::new(move |events, atomic| {
            let channels = self.clone();
            Box::pin(async move { channels.store(events, atomic).await })
        })
    }

    /// Records the channels of these types. Returns the results in the same order.
    pub(crate) async fn own(&self, event_types: Vec<String>) -> Result<Vec<Result<(), ChannelError>>, StoreError> {
        let mut results: Vec<Result<(), ChannelError>> =
            event_types.iter().map(|event_type| Self::check_name(event_type)).collect();
        let unknown: Vec<usize> = {
            let state = lock(&self.0.state);
            let is_unknown =
                |place: &usize| results[*place].is_ok() && !state.recorded.contains_key(&event_types[*place]);
            (0..event_types.len()).filter(is_unknown).collect()
        };
        if unknown.is_empty() {
            return Ok(results);
        }
        let recorded = self.0.store.record(unknown.iter().map(|place| event_types[*place].clone()).collect()).await?;
        for (place, recorded) in unknown.into_iter().zip(recorded) {
            match recorded {
                Ok(()) => self.remember(&event_types[place]),
                Err(refusal) => results[place] = Err(ChannelError::of(&event_types[place], refusal)),
            }
        }
        Ok(results)
    }

    fn remember(&self, event_type: &str) {
        let mut state = lock(&self.0.state);
        if !state.recorded.contains_key(event_type) {
            state.recorded.insert(event_type.to_owned(), None);
        }
    }

    /// Notes whether a channel is paused. Returns whether it was before; `None` if the channel was not known.
    fn note_pause(&self, event_type: &str, is_paused: bool) -> Option<bool> {
        let mut state = lock(&self.0.state);
        let before = state.recorded.get(event_type).copied();
        let since = before.flatten().unwrap_or_else(Instant::now);
        state.recorded.insert(event_type.to_owned(), is_paused.then_some(since));
        before.map(|before| before.is_some())
    }

    /// True if the type has a channel.
    fn is_recorded(&self, event_type: &str) -> bool {
        lock(&self.0.state).recorded.contains_key(event_type)
    }

    /// Reads from the database which channels exist and which of them are paused. Opens those of the hub's own table.
    async fn refresh(&self) -> Result<(), StoreError> {
        for channel in self.0.store.load().await? {
            let before = self.note_pause(&channel.event_type, channel.is_paused);
            if let Some(table) = self.own_table() {
                table.open(&channel.event_type);
            }
            if before.is_some_and(|before| before != channel.is_paused) {
                self.apply_pause(&channel.event_type);
            }
        }
        Ok(())
    }

    /// Pauses or resumes a channel at all servers. Returns false if there is no such channel.
    pub(crate) async fn set_paused(&self, event_type: &str, is_paused: bool) -> Result<bool, StoreError> {
        if !self.0.store.set_paused(event_type, is_paused).await? {
            return Ok(false);
        }
        tracing::info!(event_type, is_paused, "an operator paused or resumed a channel");
        self.note_pause(event_type, is_paused);
        self.apply_pause(event_type);
        Ok(true)
    }

    fn apply_pause(&self, event_type: &str) {
        let is_held = self.is_held(event_type);
        let tables = lock(&self.0.state).tables.clone();
        tables.iter().for_each(|table| table.set_held(event_type, is_held));
    }

    /// True if events of this type wait: an operator paused the channel, or the configuration disables it.
    pub(crate) fn is_held(&self, event_type: &str) -> bool {
        self.held_for(event_type).is_some()
    }

    /// For how long events of this type have been waiting because of that; `None` if they do not.
    pub(super) fn held_for(&self, event_type: &str) -> Option<Duration> {
        let paused = lock(&self.0.state).recorded.get(event_type).copied().flatten();
        let disabled = (!self.0.settings.is_channel_enabled(event_type)).then_some(self.0.started);
        Some(paused.into_iter().chain(disabled).min()?.elapsed())
    }

    /// True if events of this type are not published to the bus of the hub, or not in the same way.
    pub(super) fn has_own_bus(&self, event_type: &str) -> bool {
        self.0.own_buses.contains_key(event_type)
    }

    /// When the channel of this type may start to publish.
    pub(crate) fn start_of(&self, event_type: &str) -> Instant {
        let delay = self.0.settings.channel(event_type).and_then(|channel| channel.start_delay);
        self.0.started + delay.unwrap_or_default()
    }

    pub(crate) fn publisher(&self, event_type: &str) -> Publisher {
        let bus = self.0.own_buses.get(event_type).unwrap_or(&self.0.bus).clone();
        Publisher { bus, topic: self.0.topics.events(event_type) }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.0.settings
    }

    pub(crate) fn relays(&self) -> &Relays {
        &self.0.relays
    }

    /// The hub's own table, if this process publishes its events.
    fn own_table(&self) -> Option<TableChannels> {
        lock(&self.0.state).tables.first().filter(|table| table.is_of_hub()).cloned()
    }

    /// All recorded channels, by event type.
    pub(crate) async fn list(&self) -> Result<Vec<ChannelStatus>, StoreError> {
        let own_lags = self.0.outbox.oldest_due_by_type().await?;
        let tables = lock(&self.0.state).tables.clone();
        let of_sources = tables.iter().filter(|table| !table.is_of_hub()).flat_map(TableChannels::lags);
        let mut lags: HashMap<String, Duration> = HashMap::new();
        for (event_type, lag) in own_lags.into_iter().chain(of_sources) {
            let longest = lags.entry(event_type).or_default();
            *longest = lag.max(*longest);
        }
        let mut statuses: Vec<ChannelStatus> = self
            .0
            .store
            .load()
            .await?
            .into_iter()
            .map(|channel| ChannelStatus {
                topic: self.0.topics.events(&channel.event_type),
                is_enabled: self.0.settings.is_channel_enabled(&channel.event_type),
                is_paused: channel.is_paused,
                failure: tables.iter().find_map(|table| table.failure(&channel.event_type)),
                lag: lags.remove(&channel.event_type).unwrap_or_default(),
                event_type: channel.event_type,
            })
            .collect();
        statuses.sort_by(|one, other| one.event_type.cmp(&other.event_type));
        Ok(statuses)
    }

    /// The relays of the hub's own table whose oldest event had been due for longer than this at the last search.
    pub(crate) fn late_relays(&self, age: Duration) -> Vec<String> {
        self.own_table().map(|table| table.late_relays(age)).unwrap_or_default()
    }

    /// For how long the oldest event of each recorded channel had been due at the last search of the hub's own table.
    pub(crate) fn lags(&self) -> Vec<(String, Duration)> {
        let lags = self.own_table().map(|table| table.lags()).unwrap_or_default();
        lags.into_iter().filter(|(event_type, _)| self.is_recorded(event_type)).collect()
    }

    /// Changes with every search of the hub's own table; `None` if this process does not read it.
    pub(crate) fn searches(&self) -> Option<u64> {
        Some(self.own_table()?.searches())
    }

    /// The label of a relay in metrics. The relays of all sources that publish the same type share one, so that the number
    /// of labels does not grow with the number of sources.
    pub(crate) fn label(relay: &str) -> String {
        match relay.strip_prefix(RELAY_PREFIX).and_then(|name| name.split_once('/')) {
            Some((_, event_type)) => relay_name(None, event_type),
            None => relay.to_owned(),
        }
    }

    /// True if a relay of this name belongs to a channel.
    pub(crate) fn is_relay(name: &str) -> bool {
        name.starts_with(RELAY_PREFIX)
    }

    /// True if a relay of this name reads the table of a source.
    pub(crate) fn is_relay_of_source(name: &str) -> bool {
        Self::is_relay(name) && name.contains('/')
    }

    /// Searches the hub's own table until the hub stops.
    async fn discover(self, table: TableChannels) {
        let stopping = self.0.relays.stopping().clone();
        let interval = self.0.settings.shortest_interval();
        let mut refreshed = Instant::now();
        loop {
            let look = async {
                if let Err(error) = in_time(table.search()).await {
                    tracing::warn!(error = error.chain(), "failed to search the outbox for rows of other programs");
                }
                if refreshed.elapsed() >= REFRESH_INTERVAL {
                    if let Err(error) = in_time(self.refresh()).await {
                        tracing::warn!(error = error.chain(), "failed to read which channels are paused");
                    }
                    refreshed = Instant::now();
                }
                sleep(interval).await;
            };
            tokio::select! {
                biased;
                () = stopping.cancelled() => return,
                () = look => {}
            }
        }
    }
}
