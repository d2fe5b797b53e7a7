use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use posthaste_core::bus::{Bus, PublishError};
use posthaste_core::hub_store::HubOutbox;
use posthaste_core::outbox::OutboxItem;
use posthaste_core::{Delivery, Failure, Outcome, Sink, lock};
use tokio::time::Instant;

use super::gate::{Gate, Permit};
use super::{ChannelError, Channels};
use crate::envelope;

/// An event of a paused channel in an ordered table is looked at again after this time. The longer the channel is paused,
/// the longer: each look changes its row.
const SHORTEST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Where the events of one type are published.
#[derive(Clone)]
pub(crate) struct Publisher {
    pub(crate) bus: Arc<dyn Bus>,
    pub(crate) topic: Arc<str>,
}

impl Publisher {
    /// Publishes a batch, and reports the outcome of each event. Returns the results.
    async fn publish(&self, batch: Vec<Delivery<OutboxItem>>) -> Vec<Result<(), PublishError>> {
        let records =
            batch.iter().map(|delivery| envelope::event_record(self.topic.clone(), delivery.item())).collect();
        let results = self.bus.publish(records).await;
        for (delivery, result) in batch.into_iter().zip(&results) {
            delivery.report(match result {
                Ok(()) => Outcome::Delivered,
                Err(error) => Outcome::Failed(error.failure()),
            });
        }
        results
    }
}

/// Publishes the events of one type.
pub(super) struct TopicSink {
    pub(super) publisher: Publisher,
    pub(super) gate: Arc<Gate>,
    pub(super) outbox: Arc<dyn HubOutbox>,
    pub(super) event_type: String,
}

#[async_trait]
impl Sink for TopicSink {
    type Item = OutboxItem;

    async fn deliver(&self, batch: Vec<Delivery<OutboxItem>>) {
        let results = self.publisher.publish(batch).await;
        if self.gate.published(&results) {
            self.outbox.wake(&self.event_type);
        }
    }
}

/// The failure that makes an event dead whose type has no channel.
pub(super) fn refused(error: &ChannelError) -> Failure {
    Failure::permanent("event_type_refused", error.to_string())
}

/// Publishes the events of all types of an ordered table, each to its topic.
pub(super) struct AllTopicsSink {
    channels: Channels,
    gate: Arc<Gate>,
    outbox: Arc<dyn HubOutbox>,
    /// The breakers of the types that have a bus of their own. An outage of such a bus stops only their events.
    own_buses: Mutex<HashMap<String, Arc<Gate>>>,
}

impl AllTopicsSink {
    pub(super) fn new(channels: Channels, gate: Arc<Gate>, outbox: Arc<dyn HubOutbox>) -> Self {
        Self { channels, gate, outbox, own_buses: Mutex::default() }
    }

    /// Publishes the events of one type to the bus of the hub, or to that of its channel. Returns the results that say
    /// something about the bus of the hub.
    async fn publish(&self, event_type: String, batch: Vec<Delivery<OutboxItem>>) -> Vec<Result<(), PublishError>> {
        let publisher = self.channels.publisher(&event_type);
        if !self.channels.has_own_bus(&event_type) {
            return publisher.publish(batch).await;
        }
        let breaker = lock(&self.own_buses)
            .entry(event_type)
            .or_insert_with(|| Arc::new(Gate::new(false, Instant::now())))
            .clone();
        match breaker.permit() {
            Permit::Wait(wait) => snooze(batch, wait.unwrap_or(SHORTEST_PAUSE)),
            Permit::All | Permit::One => _ = breaker.published(&publisher.publish(batch).await),
        }
        Vec::new()
    }
}

/// The events are due again after this time. That counts no attempt.
fn snooze(batch: Vec<Delivery<OutboxItem>>, wait: Duration) {
    batch.into_iter().for_each(|delivery| delivery.report(Outcome::Snoozed { wait }));
}

#[async_trait]
impl Sink for AllTopicsSink {
    type Item = OutboxItem;

    async fn deliver(&self, batch: Vec<Delivery<OutboxItem>>) {
        let mut by_type: BTreeMap<String, Vec<Delivery<OutboxItem>>> = BTreeMap::new();
        for delivery in batch {
            by_type.entry(delivery.item().event.event_type().to_owned()).or_default().push(delivery);
        }
        let owned = self.channels.own(by_type.keys().cloned().collect()).await;
        let mut owned = match owned {
            Ok(owned) => owned.into_iter(),
            Err(error) => {
                self.gate.probed_nothing();
                let failure = Failure::outage("database", "the owners of topics cannot be read").cause(error.chain());
                let deliveries = by_type.into_values().flatten();
                return deliveries.for_each(|delivery| delivery.report(Outcome::Failed(failure.clone())));
            }
        };
        let mut publishes = Vec::new();
        for (event_type, batch) in by_type {
            match (owned.next(), self.channels.held_for(&event_type)) {
                (Some(Err(error)), _) => {
                    let failure = refused(&error);
                    batch.into_iter().for_each(|delivery| delivery.report(Outcome::Failed(failure.clone())));
                }
                (_, Some(held_for)) => snooze(batch, (held_for / 4).clamp(SHORTEST_PAUSE, LONGEST_PAUSE)),
                (_, None) => publishes.push(self.publish(event_type, batch)),
            }
        }
        let results = join_all(publishes).await.concat();
        if results.is_empty() {
            self.gate.probed_nothing();
        } else if self.gate.published(&results) {
            self.outbox.wake("");
        }
    }
}
