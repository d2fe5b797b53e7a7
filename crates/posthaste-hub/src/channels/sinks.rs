use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::bus::{Bus, PublishError};
use posthaste_core::hub_store::HubOutbox;
use posthaste_core::outbox::OutboxItem;
use posthaste_core::{Delivery, Failure, Outcome, Sink};

use super::gate::Gate;
use super::{ChannelError, Channels};
use crate::envelope;

/// An event of a paused channel in an ordered table is looked at again after this time.
const PAUSED: Duration = Duration::from_secs(5);

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

/// Makes events dead whose type has no channel.
pub(super) struct RefusingSink(pub(super) ChannelError);

#[async_trait]
impl Sink for RefusingSink {
    type Item = OutboxItem;

    async fn deliver(&self, batch: Vec<Delivery<OutboxItem>>) {
        let failure = refused(&self.0);
        batch.into_iter().for_each(|delivery| delivery.report(Outcome::Failed(failure.clone())));
    }
}

fn refused(error: &ChannelError) -> Failure {
    Failure::permanent("event_type_refused", error.to_string())
}

/// Publishes the events of all types of an ordered table, each to its topic.
pub(super) struct AllTopicsSink {
    pub(super) channels: Channels,
    pub(super) gate: Arc<Gate>,
    pub(super) outbox: Arc<dyn HubOutbox>,
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
                let failure = Failure::outage("database", "the owners of topics cannot be read").cause(error.chain());
                let deliveries = by_type.into_values().flatten();
                return deliveries.for_each(|delivery| delivery.report(Outcome::Failed(failure.clone())));
            }
        };
        let mut results = Vec::new();
        for (event_type, batch) in by_type {
            match owned.next() {
                Some(Err(error)) => RefusingSink(error).deliver(batch).await,
                Some(Ok(())) | None if self.channels.is_held(&event_type) => {
                    batch.into_iter().for_each(|delivery| delivery.report(Outcome::Snoozed { wait: PAUSED }));
                }
                Some(Ok(())) | None => results.extend(self.channels.publisher(&event_type).publish(batch).await),
            }
        }
        if self.gate.published(&results) {
            self.outbox.wake("");
        }
    }
}
