use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::bus::Bus;
use posthaste_core::hub_store::{Admission, ChannelStore, HubOutbox, HubStores, Ingested, Refusal};
use posthaste_core::outbox::OutboxItem;
use posthaste_core::{
    Delivery, Event, Failure, FaultKind, OnStop, Outcome, RelayOptions, RetryPolicy, Sink, StoreError, lock,
};
use tokio::time::sleep;

use crate::envelope;
use crate::ingest::{StoreEvents, StoreResults};
use crate::relays::Relays;
use crate::settings::Settings;
use crate::topics::TopicNames;

/// One relay per event type, from the outbox table to the topic of that type. A new type gets a new channel.
///
/// Which type owns which topic is recorded in the database, in the transaction of the type's first event. This process
/// only starts the relays of recorded types.
#[derive(Clone)]
pub struct Channels(Arc<Inner>);

struct Inner {
    outbox: Arc<dyn HubOutbox>,
    store: Arc<dyn ChannelStore>,
    bus: Arc<dyn Bus>,
    topics: TopicNames,
    relays: Relays,
    settings: Settings,
    /// Event types whose relay runs.
    open: Mutex<HashSet<String>>,
    /// Event types without a channel, whose rows become dead.
    refused: Mutex<HashSet<String>>,
    /// Event types that had due rows when the outbox was last searched.
    due: Mutex<HashSet<String>>,
}

const RELAY_PREFIX: &str = "channel:";

/// The name of a channel's relay in logs, metrics and readiness.
pub(crate) fn relay_name(event_type: &str) -> String {
    format!("{RELAY_PREFIX}{event_type}")
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

impl Channels {
    pub(crate) fn new(stores: &HubStores, bus: Arc<dyn Bus>, relays: Relays, settings: &Settings) -> Self {
        Self(Arc::new(Inner {
            outbox: stores.outbox.clone(),
            store: stores.channels.clone(),
            bus,
            topics: TopicNames::new(&settings.bus.topic_prefix),
            relays,
            settings: settings.clone(),
            open: Mutex::default(),
            refused: Mutex::default(),
            due: Mutex::default(),
        }))
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
            self.open(event_type);
            self.0.outbox.wake(event_type);
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

    /// Opens all channels that are recorded in the database.
    pub(crate) async fn open_recorded(&self) -> Result<(), StoreError> {
        for event_type in self.0.store.load().await? {
            self.open(&event_type);
        }
        Ok(())
    }

    /// Starts the relay of a type whose channel is recorded, unless the relay runs already.
    fn open(&self, event_type: &str) {
        if lock(&self.0.open).insert(event_type.to_owned()) {
            let inner = &self.0;
            let topic = inner.topics.events(event_type);
            self.run(event_type, TopicSink { bus: inner.bus.clone(), topic });
        }
    }

    fn run(&self, event_type: &str, sink: impl Sink<Item = OutboxItem>) {
        let outbox = &self.0.settings.outbox;
        let options = RelayOptions {
            workers: 2,
            chunk: outbox.batch_size,
            batch: outbox.batch_size,
            max_in_flight: 2 * outbox.batch_size,
            // `discover` finds rows of other programs with one query for all channels, and wakes their relays. A relay
            // polls only in case a wake-up is lost. The interval is long, because a thousand idle channels must not use
            // CPU.
            poll_interval: Duration::from_secs(15 * 60),
            retry: RetryPolicy::Exponential {
                base: outbox.backoff_base,
                max: outbox.backoff_max,
                max_attempts: Some(outbox.max_attempts),
            },
            drain: outbox.drain,
            on_stop: OnStop::Release,
            ..RelayOptions::default()
        };
        let (first, outbox, named) = (self.0.outbox.source(event_type), self.0.outbox.clone(), event_type.to_owned());
        let again = move || {
            let source = outbox.source(&named);
            Box::pin(async move { Ok(source) }) as _
        };
        self.0.relays.start(relay_name(event_type), first, Box::new(again), sink, options);
    }

    /// True if a relay of this name belongs to a channel.
    pub(crate) fn is_relay(name: &str) -> bool {
        name.starts_with(RELAY_PREFIX)
    }

    /// The relays of the types that had due rows when the outbox was last searched.
    pub(crate) fn due_relays(&self) -> Vec<String> {
        lock(&self.0.due).iter().map(|event_type| relay_name(event_type)).collect()
    }

    /// Searches the outbox for rows of other programs, and wakes or opens their channels, until the hub stops.
    pub(crate) async fn discover(self) {
        let stopping = self.0.relays.stopping().clone();
        loop {
            if let Err(error) = self.search().await {
                tracing::warn!(error = error.chain(), "failed to search the outbox for rows of other programs");
            }
            tokio::select! {
                biased;
                () = stopping.cancelled() => return,
                () = sleep(self.0.settings.outbox.poll_interval) => {}
            }
        }
    }

    async fn search(&self) -> Result<(), StoreError> {
        let pending = self.0.outbox.pending_types().await?;
        let is_new = |event_type: &&String| {
            !lock(&self.0.open).contains(*event_type) && !lock(&self.0.refused).contains(*event_type)
        };
        let mut named = Vec::new();
        for event_type in pending.iter().filter(is_new) {
            match Self::check_name(event_type) {
                Ok(()) => named.push(event_type.clone()),
                Err(error) => self.refuse(event_type, error),
            }
        }
        if !named.is_empty() {
            let results = self.0.store.record(named.clone()).await?;
            for (event_type, result) in named.iter().zip(results) {
                match result {
                    Ok(()) => self.open(event_type),
                    Err(refusal) => self.refuse(event_type, ChannelError::of(event_type, refusal)),
                }
            }
        }
        pending.iter().for_each(|event_type| self.0.outbox.wake(event_type));
        *lock(&self.0.due) = pending.into_iter().collect();
        Ok(())
    }

    /// Starts a relay that makes the rows of a refused type dead, with the reason. Operators see such rows and can
    /// replay them.
    fn refuse(&self, event_type: &str, error: ChannelError) {
        let mut refused = lock(&self.0.refused);
        if refused.len() >= self.0.settings.bus.max_channels {
            let refused = refused.len();
            return tracing::error!(
                %error,
                refused,
                "rows of this event type stay pending, because too many types are refused: delete them, or raise bus.max_channels"
            );
        }
        tracing::error!(%error, "event type refused: its outbox rows become dead");
        refused.insert(event_type.to_owned());
        self.run(event_type, RefusingSink(error));
    }
}

/// Makes events dead whose type has no channel.
struct RefusingSink(ChannelError);

#[async_trait]
impl Sink for RefusingSink {
    type Item = OutboxItem;

    async fn deliver(&self, batch: Vec<Delivery<OutboxItem>>) {
        let failure = Failure::permanent("event_type_refused", self.0.to_string());
        batch.into_iter().for_each(|delivery| delivery.report(Outcome::Failed(failure.clone())));
    }
}

/// Publishes events of one type to their topic.
struct TopicSink {
    bus: Arc<dyn Bus>,
    topic: Arc<str>,
}

#[async_trait]
impl Sink for TopicSink {
    type Item = OutboxItem;

    async fn deliver(&self, batch: Vec<Delivery<OutboxItem>>) {
        let records =
            batch.iter().map(|delivery| envelope::event_record(self.topic.clone(), delivery.item())).collect();
        let results = self.bus.publish(records).await;
        for (delivery, result) in batch.into_iter().zip(results) {
            delivery.report(result.map_or_else(|error| Outcome::Failed(error.failure()), |()| Outcome::Delivered));
        }
    }
}
