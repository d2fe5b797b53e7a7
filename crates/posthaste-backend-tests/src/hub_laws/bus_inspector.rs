//! The laws of [`BusInspector`](posthaste_core::hub_store::BusInspector) and
//! [`Quarantine`](posthaste_core::bus::Quarantine).

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use posthaste_core::Settled;
use posthaste_core::bus::{Bus, Consumer, Fetched, Poison, Position, Quarantine, Record, Topics};
use posthaste_core::hub_store::{BusInspector, GroupProgress};

use super::{HubHarness, options};

/// A bus with its inspector and quarantine.
pub struct InspectedBus {
    /// The bus.
    pub bus: Arc<dyn Bus>,
    /// Its inspector.
    pub inspector: Arc<dyn BusInspector>,
    /// Its quarantine.
    pub quarantine: Arc<dyn Quarantine>,
}

/// One store that buses are opened on. Each law gets a fresh one. Every [`HubHarness`] is one.
#[async_trait]
pub trait InspectorHarness: Send + Sync {
    /// A bus on the store, with leases that do not end during a test.
    async fn open_bus(&self) -> InspectedBus;
}

#[async_trait]
impl<H: HubHarness> InspectorHarness for H {
    async fn open_bus(&self) -> InspectedBus {
        let stores = self.open(options()).await;
        InspectedBus { bus: stores.bus, inspector: stores.inspector, quarantine: stores.quarantine }
    }
}

/// Expands to one test per law of [`BusInspector`] and [`Quarantine`], each on the fresh harness that the expression
/// makes: `bus_inspector_laws!(Harness::start().await)`.
#[macro_export]
macro_rules! bus_inspector_laws {
    ($harness:expr) => {
        $crate::bus_inspector_laws!(
            $harness =>
            the_log_shows_where_an_event_is_and_which_groups_have_done_it
            an_event_with_very_many_records_shows_its_oldest_ones
            a_backlog_exists_until_the_group_has_done_its_records
            the_lag_of_a_group_is_the_age_of_its_oldest_record
            retention_never_passes_the_slowest_group
            a_record_is_quarantined_once_per_group
        );
    };
    ($harness:expr => $($law:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $law() {
                $crate::hub_laws::bus_inspector::$law(&$harness).await;
            }
        )*
    };
}

fn record(topic: &str, number: u64) -> Record {
    let key = format!("key {number}");
    Record { topic: topic.into(), route: 0, key, value: Bytes::from_static(b"value"), headers: Vec::new() }
}

async fn publish(bus: &dyn Bus, records: impl IntoIterator<Item = Record>) {
    for answer in bus.publish(records.into_iter().collect()).await {
        answer.unwrap();
    }
}

async fn join(bus: &dyn Bus, group: &str, topic: &str) -> Box<dyn Consumer> {
    bus.subscribe(group, Topics::Named(vec![topic.to_owned()])).await.unwrap()
}

async fn ack<'a>(consumer: &dyn Consumer, fetched: impl IntoIterator<Item = &'a Fetched>) {
    let positions: Vec<&Position> = fetched.into_iter().map(|fetched| &fetched.position).collect();
    assert_eq!(consumer.ack(&positions).await.unwrap(), vec![Settled::Applied; positions.len()]);
}

/// Shows every record of a key with its position, and which groups have done it.
pub async fn the_log_shows_where_an_event_is_and_which_groups_have_done_it(harness: &impl InspectorHarness) {
    let stores = harness.open_bus().await;
    publish(&*stores.bus, [record("a", 7), record("a", 8), record("a", 7), record("b", 7)]).await;
    let consumer = join(&*stores.bus, "group", "a").await;
    let other = stores.bus.subscribe("other", Topics::Prefix("a".to_owned())).await.unwrap();
    let fetched = consumer.fetch(10).await.unwrap();
    ack(&*consumer, [&fetched[2]]).await;
    ack(&*other, [&other.fetch(10).await.unwrap()[0]]).await;

    let entries = stores.inspector.records_of("key 7").await.unwrap();
    let places: Vec<(&str, i64)> = entries.iter().map(|entry| (entry.topic.as_str(), entry.offset)).collect();
    assert_eq!(places, [("a", 0), ("a", 2), ("b", 0)]);
    let progress = |group: &str, done| GroupProgress { group: group.to_owned(), done };
    assert_eq!(entries[0].groups, [progress("group", false), progress("other", true)]);
    assert_eq!(entries[1].groups, [progress("group", true), progress("other", false)]);
    assert!(entries[2].groups.is_empty());
    assert!(stores.inspector.records_of("unknown").await.unwrap().is_empty());

    let topics = stores.inspector.topics().await.unwrap();
    let state = topics.iter().find(|state| state.topic == "a" && state.next_offset == 3).unwrap();
    assert_eq!(state.groups, [("group".to_owned(), 0), ("other".to_owned(), 1)]);
}

/// The number of returned records is bounded.
pub async fn an_event_with_very_many_records_shows_its_oldest_ones(harness: &impl InspectorHarness) {
    let stores = harness.open_bus().await;
    let _groups = (join(&*stores.bus, "group", "a").await, join(&*stores.bus, "other", "a").await);
    publish(&*stores.bus, (0..250).map(|_| record("a", 7))).await;
    let entries = stores.inspector.records_of("key 7").await.unwrap();
    let offsets: Vec<i64> = entries.iter().map(|entry| entry.offset).collect();
    assert_eq!(offsets, (0..200).collect::<Vec<_>>());
}

/// A backlog changes with every record that is done, also out of order, and ends with the last record.
pub async fn a_backlog_exists_until_the_group_has_done_its_records(harness: &impl InspectorHarness) {
    let stores = harness.open_bus().await;
    publish(&*stores.bus, (0..2).map(|number| record("a", number))).await;
    let consumer = join(&*stores.bus, "group", "a").await;
    let fetched = consumer.fetch(10).await.unwrap();
    let before = stores.inspector.backlogs().await.unwrap();
    assert_eq!(before.len(), 1);
    assert_eq!((before[0].group.as_str(), before[0].topic.as_str()), ("group", "a"));
    ack(&*consumer, [&fetched[1]]).await;
    let after = stores.inspector.backlogs().await.unwrap();
    assert!(after.len() == 1 && after[0].progress != before[0].progress, "{after:?}");
    ack(&*consumer, [&fetched[0]]).await;
    assert!(stores.inspector.backlogs().await.unwrap().is_empty());
}

/// A group that has done everything has no lag.
pub async fn the_lag_of_a_group_is_the_age_of_its_oldest_record(harness: &impl InspectorHarness) {
    const WAIT: Duration = Duration::from_millis(50);
    let stores = harness.open_bus().await;
    publish(&*stores.bus, [record("a", 0)]).await;
    let consumer = join(&*stores.bus, "group", "a").await;
    let fetched = consumer.fetch(10).await.unwrap();
    tokio::time::sleep(WAIT).await;
    publish(&*stores.bus, [record("a", 1)]).await;
    let lags = stores.inspector.lag_of_groups().await.unwrap();
    assert!(matches!(&lags[..], [(group, lag)] if group == "group" && *lag >= WAIT / 2), "{lags:?}");
    ack(&*consumer, &fetched).await;
    ack(&*consumer, &consumer.fetch(10).await.unwrap()).await;
    assert!(stores.inspector.lag_of_groups().await.unwrap().is_empty());
}

/// An expired record is kept until every group has done it, and a record that no group reads is kept.
pub async fn retention_never_passes_the_slowest_group(harness: &impl InspectorHarness) {
    let stores = harness.open_bus().await;
    let (bus, inspector) = (&*stores.bus, &*stores.inspector);
    publish(bus, (0..5).map(|number| record("a", number)).chain([record("unread", 9)])).await;
    let (fast, slow) = (join(bus, "fast", "a").await, join(bus, "slow", "a").await);
    ack(&*fast, &fast.fetch(10).await.unwrap()).await;
    assert_eq!(inspector.remove_expired(Duration::ZERO).await.unwrap(), 0, "a group has done nothing yet");
    let fetched = slow.fetch(10).await.unwrap();
    // The third record is not done, so the fourth stays.
    ack(&*slow, [&fetched[0], &fetched[1], &fetched[3]]).await;
    assert_eq!(inspector.remove_expired(Duration::from_secs(3_600)).await.unwrap(), 0, "nothing is expired");
    assert_eq!(inspector.remove_expired(Duration::ZERO).await.unwrap(), 2);
    let topics = inspector.topics().await.unwrap();
    let first = |topic: &str| topics.iter().find(|state| state.topic == topic && state.next_offset > 0).unwrap();
    assert_eq!((first("a").first_offset, first("unread").first_offset), (2, 0));
    ack(&*slow, [&fetched[2], &fetched[4]]).await;
    inspector.remove_expired(Duration::ZERO).await.unwrap();
    assert!(inspector.backlogs().await.unwrap().is_empty(), "no position is lost");
    publish(bus, [record("a", 10)]).await;
    assert_eq!(slow.fetch(10).await.unwrap()[0].position.offset, 5, "the group goes on");
}

/// Quarantining the same record again changes nothing. Another group has its own entry.
pub async fn a_record_is_quarantined_once_per_group(harness: &impl InspectorHarness) {
    let stores = harness.open_bus().await;
    publish(&*stores.bus, (0..100).map(|number| record("orders", number))).await;
    let consumer = join(&*stores.bus, "group", "orders").await;
    let fetched = consumer.fetch(100).await.unwrap();
    let poison: Vec<Poison> =
        fetched.into_iter().map(|record| Poison { record, reason: "unknown schema 7".to_owned() }).collect();
    stores.quarantine.quarantine("group", &[]).await.unwrap();
    stores.quarantine.quarantine("group", &poison[..70]).await.unwrap();
    stores.quarantine.quarantine("group", &poison).await.unwrap();
    assert_eq!(stores.inspector.quarantined_count().await.unwrap(), 100);
    stores.quarantine.quarantine("other", &poison[..1]).await.unwrap();
    assert_eq!(stores.inspector.quarantined_count().await.unwrap(), 101);
}
