use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use posthaste_api::proto::EventHubEvent;
use posthaste_core::bus::{Bus, Record};
use posthaste_core::{BusItem, Delivery, Failure, Outcome, Sink, StoreError};

use crate::envelope;
use crate::routing;
use crate::settings::Settings;
use crate::subscribers::{Routes, Subscribers};
use crate::topics::TopicNames;

/// How much is published at once.
const PART: usize = 1_000;
const PART_BYTES: usize = 8 * 1024 * 1024;

/// Turns each event into one delivery per matching subscription, on the topic of its domain.
pub(crate) struct FanOut {
    bus: Arc<dyn Bus>,
    subscribers: Subscribers,
    topics: TopicNames,
    settings: Settings,
    /// Which subscriptions of an event already have their record, after a publish that went through in part.
    sent: Mutex<HashMap<String, HashSet<String>>>,
}

/// The record of one delivery, and whose it is.
struct Addressed {
    event: usize,
    subscription_id: String,
    record: Record,
}

impl FanOut {
    pub(crate) fn new(bus: Arc<dyn Bus>, subscribers: Subscribers, settings: &Settings) -> Self {
        let topics = TopicNames::new(&settings.topic_prefix);
        Self { bus, subscribers, topics, settings: settings.clone(), sent: Mutex::default() }
    }

    fn address(&self, index: usize, event: &EventHubEvent, routes: &Routes, addressed: &mut Vec<Addressed>) {
        let domain = routing::domain_of(&self.settings.routing, event);
        let sent = self.lock().get(&event.event_id).cloned().unwrap_or_default();
        let before = addressed.len();
        for route in routes.matching(event).filter(|route| !sent.contains(&route.subscription.id)) {
            addressed.push(Addressed {
                event: index,
                subscription_id: route.subscription.id.clone(),
                record: envelope::delivery_record(&self.topics, domain, event, route, &self.settings.delivery),
            });
        }
        if addressed.len() == before && sent.is_empty() {
            metrics::counter!("posthaste_unmatched_total").increment(1);
        }
    }

    /// In parts: a batch with many subscriptions must not become one transaction that everybody else waits for.
    async fn publish(&self, mut records: Vec<Record>) -> Vec<Result<(), Arc<StoreError>>> {
        let mut answers = Vec::with_capacity(records.len());
        while !records.is_empty() {
            let mut bytes = 0;
            let mut fits = |record: &Record| {
                bytes += record.value.len();
                bytes <= PART_BYTES
            };
            let part = records.iter().take(PART).take_while(|record| fits(record)).count().max(1);
            let later = records.split_off(part);
            answers.extend(self.bus.publish(std::mem::replace(&mut records, later)).await);
        }
        answers
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, HashSet<String>>> {
        self.sent.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[async_trait]
impl Sink for FanOut {
    type Item = BusItem<EventHubEvent>;

    async fn deliver(&self, batch: Vec<Delivery<Self::Item>>) {
        let routes = match self.subscribers.routes().await {
            Ok(routes) => routes,
            Err(error) => {
                let failure = Failure::outage("registry", "subscriptions cannot be read").cause(error.chain());
                return batch.into_iter().for_each(|delivery| delivery.report(Outcome::Failed(failure.clone())));
            }
        };
        let mut addressed = Vec::new();
        for (index, delivery) in batch.iter().enumerate() {
            self.address(index, &delivery.item().value, &routes, &mut addressed);
        }
        let owners: Vec<_> = addressed.iter().map(|one| (one.event, one.subscription_id.clone())).collect();
        let answers = self.publish(addressed.into_iter().map(|one| one.record).collect()).await;

        let mut failures: HashMap<usize, Failure> = HashMap::new();
        for ((event, _), answer) in owners.iter().zip(&answers) {
            if let Err(error) = answer {
                let failure = Failure::outage("bus", "the bus did not take every delivery").cause(error.chain());
                failures.insert(*event, failure);
            }
        }
        if !failures.is_empty() {
            let acked = owners
                .iter()
                .zip(&answers)
                .filter(|((event, _), answer)| answer.is_ok() && failures.contains_key(event));
            for ((event, subscription_id), _) in acked {
                let event_id = batch[*event].item().value.event_id.clone();
                self.lock().entry(event_id).or_default().insert(subscription_id.clone());
            }
        }
        for (index, delivery) in batch.into_iter().enumerate() {
            match failures.remove(&index) {
                Some(failure) => delivery.report(Outcome::Failed(failure)),
                None => {
                    self.lock().remove(&delivery.item().value.event_id);
                    delivery.report(());
                }
            }
        }
    }
}
