use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::bus::Bus;
use posthaste_core::outbox::{OutboxItem, Table};
use posthaste_core::{Delivery, Failure, OnStop, Outcome, RelayOptions, RetryPolicy, Sink, StoreError};
use posthaste_sql::sqlite::{Log, OutboxStore};
use tokio::time::sleep;

use crate::envelope;
use crate::relays::Relays;
use crate::settings::Settings;
use crate::topics::TopicNames;

/// One relay per event type, from the outbox table to the topic of that type. A new type makes its channel.
#[derive(Clone)]
pub struct Channels(Arc<Inner>);

struct Inner {
    outbox: Table<OutboxStore>,
    bus: Arc<dyn Bus>,
    topics: TopicNames,
    relays: Relays,
    settings: Settings,
    /// Event types by their name as the strictest bus would tell them apart.
    open: Mutex<HashMap<String, String>>,
    refused: Mutex<HashSet<String>>,
}

/// Why an event type has no channel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    #[error("event type {refused:?} is not 1 to 128 characters of A-Z a-z 0-9 . _ -, and so no topic's name")]
    BadName { refused: String },
    #[error(
        "event type {refused:?} differs from {existing:?} only in '.' and '_', which topic names cannot tell apart"
    )]
    Collision { refused: String, existing: String },
    #[error(
        "event type {refused:?} would be channel number {limit} plus one: raise bus.max_channels or use known types"
    )]
    TooMany { refused: String, limit: usize },
}

impl Channels {
    pub(crate) fn new(outbox: Table<OutboxStore>, bus: Arc<dyn Bus>, relays: Relays, settings: &Settings) -> Self {
        let topics = TopicNames::new(&settings.topic_prefix);
        Self(Arc::new(Inner {
            outbox,
            bus,
            topics,
            relays,
            settings: settings.clone(),
            open: Mutex::default(),
            refused: Mutex::default(),
        }))
    }

    /// Opens the channel of this type where there is none yet.
    pub(crate) fn admit(&self, event_type: &str) -> Result<(), ChannelError> {
        if !posthaste_api::is_event_type(event_type) {
            return Err(ChannelError::BadName { refused: event_type.chars().take(200).collect() });
        }
        let mut open = self.lock();
        let limit = self.0.settings.max_channels;
        match open.get(&event_type.replace('.', "_")) {
            Some(existing) if existing == event_type => return Ok(()),
            Some(existing) => {
                return Err(ChannelError::Collision { refused: event_type.to_owned(), existing: existing.clone() });
            }
            None if open.len() >= limit => return Err(ChannelError::TooMany { refused: event_type.to_owned(), limit }),
            None => {}
        }
        open.insert(event_type.replace('.', "_"), event_type.to_owned());
        self.start(event_type);
        Ok(())
    }

    /// Opens the channels of all types that have a topic: which of two names came first must not change with a restart.
    pub(crate) async fn open_known(&self, log: &Log) -> Result<(), StoreError> {
        let prefix = self.0.topics.all_events();
        for topic in log.topics().await? {
            if let Some(event_type) = topic.topic.strip_prefix(&prefix)
                && let Err(error) = self.admit(event_type)
            {
                tracing::error!(%error, "a topic of an earlier start has no channel");
            }
        }
        Ok(())
    }

    fn start(&self, event_type: &str) {
        let inner = &self.0;
        let topic = inner.topics.events(event_type);
        self.run(event_type, TopicSink { bus: inner.bus.clone(), topic });
    }

    fn run(&self, event_type: &str, sink: impl Sink<Item = OutboxItem>) {
        let outbox = &self.0.settings.outbox;
        let options = RelayOptions {
            workers: 2,
            chunk: outbox.batch_size,
            batch: outbox.batch_size,
            max_in_flight: 2 * outbox.batch_size,
            // What others insert is found by one look for all channels; this is only the net below it.
            poll_interval: Duration::from_secs(60),
            retry: RetryPolicy::Exponential {
                base: outbox.backoff_base,
                max: outbox.backoff_max,
                max_attempts: Some(outbox.max_attempts),
            },
            drain: outbox.drain,
            on_stop: OnStop::Release,
            ..RelayOptions::default()
        };
        let source = self.0.outbox.channel_source(event_type);
        self.0.relays.start(format!("channel:{event_type}"), source, sink, options);
    }

    /// Looks for rows that somebody else inserted, and wakes or opens their channels, until the hub stops.
    pub(crate) async fn discover(self) {
        let stopping = self.0.relays.stopping().clone();
        loop {
            self.look().await;
            tokio::select! {
                biased;
                () = stopping.cancelled() => return,
                () = sleep(self.0.settings.outbox.poll_interval) => {}
            }
        }
    }

    async fn look(&self) {
        match self.0.outbox.pending_types().await {
            Ok(types) => {
                for event_type in types {
                    self.open_or_refuse(&event_type);
                    self.0.outbox.wake(&event_type);
                }
            }
            Err(error) => tracing::warn!(error = error.chain(), "the outbox could not be looked at"),
        }
    }

    /// The rows of a type that can have no channel go dead with the reason, where an operator sees and replays them.
    fn open_or_refuse(&self, event_type: &str) {
        let Err(error) = self.admit(event_type) else { return };
        let mut refused = self.0.refused.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if refused.contains(event_type) {
            return;
        }
        if refused.len() >= self.0.settings.max_channels {
            return tracing::error!(%error, "rows of this type wait in the outbox: there are too many such types");
        }
        tracing::error!(%error, "rows of this type in the outbox go dead");
        refused.insert(event_type.to_owned());
        self.run(event_type, RefusingSink(error));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, String>> {
        self.0.open.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Gives up on events whose type has no channel.
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
        let answers = self.bus.publish(records).await;
        for (delivery, answer) in batch.into_iter().zip(answers) {
            delivery.report(match answer {
                Ok(()) => Outcome::Delivered,
                Err(error) => Outcome::Failed(Failure::outage("bus", "the bus did not take it").cause(error.chain())),
            });
        }
    }
}
