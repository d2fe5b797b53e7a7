use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use posthaste_api::proto::EventHubEvent;
use posthaste_core::bus::{Bus, PublishError, Record};
use posthaste_core::metric_names::UNMATCHED;
use posthaste_core::{BusItem, Delivery, Failure, FailureClass, Outcome, Sink, lock};

use crate::domains;
use crate::envelope::{self, IdAndTime, id_and_time};
use crate::matching::{ActiveSubscription, SubscriptionIndex, SubscriptionMatcher};
use crate::settings::Settings;
use crate::topics::TopicNames;

/// The maximum size of one publish. A single record may be larger.
const PART: usize = 1_000;
const PART_BYTES: usize = 8 * 1024 * 1024;

/// Publishes one delivery per event and matching subscription, on the topic of the event's domain.
pub(crate) struct FanOut {
    bus: Arc<dyn Bus>,
    matcher: SubscriptionMatcher,
    topics: TopicNames,
    settings: Settings,
    /// The subscriptions of an event that already have their record, after a publish that succeeded only in part.
    sent: Mutex<HashMap<IdAndTime, HashSet<String>>>,
}

/// The record of one delivery, with its event and subscription.
struct Addressed {
    event: usize,
    subscription: Arc<ActiveSubscription>,
    record: Record,
}

/// The result of publishing one delivery.
struct Published {
    event: usize,
    subscription: Arc<ActiveSubscription>,
    result: Result<(), PublishError>,
}

impl FanOut {
    pub(crate) fn new(bus: Arc<dyn Bus>, matcher: SubscriptionMatcher, settings: &Settings) -> Self {
        let topics = settings.topic_names();
        Self { bus, matcher, topics, settings: settings.clone(), sent: Mutex::default() }
    }

    /// The deliveries of one event to `matching` that have no record yet. The iterator encodes each when it returns it.
    fn address<'a>(
        &'a self,
        index: usize,
        event: &'a EventHubEvent,
        matching: Vec<&'a Arc<ActiveSubscription>>,
    ) -> impl Iterator<Item = Addressed> + Send + 'a {
        let domain = domains::domain_of(&self.settings.routing, event);
        let sent = lock(&self.sent).get(&id_and_time(event)).cloned().unwrap_or_default();
        let unsent = matching.into_iter().filter(move |active| !sent.contains(&active.subscription.id));
        unsent.map(move |active| Addressed {
            event: index,
            subscription: active.clone(),
            record: envelope::delivery_record(&self.topics, domain, event, active, &self.settings.delivery),
        })
    }

    /// Publishes the deliveries of these events; also returns how many events match no subscription. An event is matched
    /// when the deliveries before it are published, so the memory does not grow with the batch.
    async fn publish(&self, events: &[Arc<EventHubEvent>], active: &SubscriptionIndex) -> (Vec<Published>, u64) {
        let mut unmatched = 0;
        let deliveries = events.iter().enumerate().flat_map(|(index, event)| {
            let matching = active.matching(event);
            unmatched += u64::from(matching.is_empty());
            self.address(index, event, matching)
        });
        (publish_in_parts(&*self.bus, deliveries).await, unmatched)
    }

    /// Remembers the deliveries that a partly failed publish has published: the next attempt publishes only the rest.
    fn remember(&self, events: &[Arc<EventHubEvent>], published: &[Published], failures: &HashMap<usize, Failure>) {
        let is_kept = |one: &&Published| one.result.is_ok() && failures.contains_key(&one.event);
        for one in published.iter().filter(is_kept) {
            let key = id_and_time(&events[one.event]);
            lock(&self.sent).entry(key).or_default().insert(one.subscription.subscription.id.clone());
        }
    }
}

/// Publishes in parts, and encodes a part only when the previous part is published. So the memory of a batch depends
/// neither on the number of its events nor on the number of their subscriptions.
async fn publish_in_parts(bus: &dyn Bus, mut deliveries: impl Iterator<Item = Addressed> + Send) -> Vec<Published> {
    let mut published = Vec::new();
    let mut next = deliveries.next();
    while next.is_some() {
        let (mut owners, mut records, mut bytes) = (Vec::new(), Vec::new(), 0);
        while let Some(Addressed { event, subscription, record }) =
            next.take_if(|one| records.is_empty() || (records.len() < PART && bytes + one.record.size() <= PART_BYTES))
        {
            bytes += record.size();
            owners.push((event, subscription));
            records.push(record);
            next = deliveries.next();
        }
        let results = bus.publish(records).await;
        let with_result = |((event, subscription), result)| Published { event, subscription, result };
        published.extend(owners.into_iter().zip(results).map(with_result));
    }
    published
}

#[async_trait]
impl Sink for FanOut {
    type Item = BusItem<EventHubEvent>;

    async fn deliver(&self, batch: Vec<Delivery<Self::Item>>) {
        let active = match self.matcher.current().await {
            Ok(active) => active,
            Err(error) => {
                let failure = Failure::outage("registry", "subscriptions cannot be read").cause(error.chain());
                return batch.into_iter().for_each(|delivery| delivery.report(Outcome::Failed(failure.clone())));
            }
        };
        let events: Vec<_> = batch.iter().map(|delivery| delivery.item().value.clone()).collect();
        let (published, unmatched) = self.publish(&events, &active).await;
        metrics::counter!(UNMATCHED).increment(unmatched);

        let mut failures: HashMap<usize, Failure> = HashMap::new();
        for one in &published {
            if let Err(error) = &one.result {
                // A refused delivery makes its event dead, but only when all other deliveries are published.
                let is_refused = |known: &Failure| known.class == FailureClass::Permanent;
                if failures.get(&one.event).is_none_or(is_refused) {
                    failures.insert(one.event, error.failure());
                }
            }
        }
        self.remember(&events, &published, &failures);
        for (index, delivery) in batch.into_iter().enumerate() {
            let failure = failures.remove(&index);
            if failure.as_ref().is_none_or(|failure| failure.class == FailureClass::Permanent) {
                lock(&self.sent).remove(&id_and_time(&delivery.item().value));
            }
            delivery.report(failure.map_or(Outcome::Delivered, Outcome::Failed));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use bytes::Bytes;
    use posthaste_core::StoreError;
    use posthaste_core::bus::{Consumer, Topics};

    use super::*;

    const MIB: usize = 1024 * 1024;

    /// Counts the published records and stores none.
    #[derive(Default)]
    struct CountingBus {
        encoded: Arc<AtomicUsize>,
        published: AtomicUsize,
        /// The most bytes that were encoded and not yet published at any time.
        peak: AtomicUsize,
        records: AtomicUsize,
    }

    #[async_trait]
    impl Bus for CountingBus {
        async fn publish(&self, records: Vec<Record>) -> Vec<Result<(), PublishError>> {
            let unpublished = self.encoded.load(Ordering::Relaxed) - self.published.load(Ordering::Relaxed);
            self.peak.fetch_max(unpublished, Ordering::Relaxed);
            self.published.fetch_add(records.iter().map(Record::size).sum(), Ordering::Relaxed);
            self.records.fetch_add(records.len(), Ordering::Relaxed);
            vec![Ok(()); records.len()]
        }

        async fn subscribe(&self, _: &str, _: Topics) -> Result<Box<dyn Consumer>, StoreError> {
            unreachable!("the test never subscribes")
        }
    }

    /// Deliveries that are encoded when the iterator returns them, as those of `address` are.
    fn deliveries(encoded: Arc<AtomicUsize>, count: usize, size: usize) -> impl Iterator<Item = Addressed> {
        let subscription = Arc::new(ActiveSubscription::for_tests("subscription"));
        (0..count).map(move |event| {
            let record = Record {
                topic: "posthaste.outbox.organization".into(),
                route: 0,
                key: String::new(),
                value: Bytes::from(vec![0; size]),
                headers: Vec::new(),
            };
            encoded.fetch_add(record.size(), Ordering::Relaxed);
            Addressed { event, subscription: subscription.clone(), record }
        })
    }

    #[tokio::test]
    async fn a_part_is_encoded_only_when_the_previous_part_is_published() {
        let bus = CountingBus::default();
        let published = publish_in_parts(&bus, deliveries(bus.encoded.clone(), 1_000, MIB)).await;
        assert_eq!((published.len(), bus.records.load(Ordering::Relaxed)), (1_000, 1_000));
        let peak = bus.peak.load(Ordering::Relaxed);
        assert!(peak <= PART_BYTES + MIB, "{} MiB were encoded at once", peak / MIB);
    }

    #[tokio::test]
    async fn a_record_larger_than_a_part_is_published_alone_and_small_ones_in_parts() {
        let bus = CountingBus::default();
        assert_eq!(publish_in_parts(&bus, deliveries(bus.encoded.clone(), 3, 2 * PART_BYTES)).await.len(), 3);
        let bus = CountingBus::default();
        let published = publish_in_parts(&bus, deliveries(bus.encoded.clone(), 2 * PART + 1, 1)).await;
        assert_eq!(published.iter().map(|one| one.event).collect::<Vec<_>>(), (0..2 * PART + 1).collect::<Vec<_>>());
        assert!(bus.peak.load(Ordering::Relaxed) <= PART + 1);
    }
}
