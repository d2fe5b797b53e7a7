//! The laws of [`BusInspector`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use posthaste_core::Settled;
use posthaste_core::bus::{Bus, Consumer, Fetched, Position, Record, Topics};
use posthaste_core::hub_store::{BusInspector, GroupProgress, READ_BYTES};

use super::{HubHarness, options};

/// A bus with its inspector.
pub struct InspectedBus {
    /// The bus.
    pub bus: Arc<dyn Bus>,
    /// Its inspector.
    pub inspector: Arc<dyn BusInspector>,
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
        InspectedBus { bus: stores.bus, inspector: stores.inspector }
    }
}

/// Expands to one test per law of [`BusInspector`], each on the fresh harness that the expression makes:
/// `bus_inspector_laws!(Harness::start().await)`.
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
            a_read_continues_in_every_partition
            a_read_is_bounded_in_records_and_bytes
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

/// Reads all records of a topic for an operator, page by page, and returns them with the number of pages.
async fn read_all(inspector: &dyn BusInspector, topic: &str, limit: usize) -> (Vec<Fetched>, usize) {
    let states = inspector.topics().await.unwrap();
    let of_topic = states.iter().filter(|state| state.topic == topic);
    let mut from: BTreeMap<u32, i64> = of_topic.map(|state| (state.partition, state.first_offset)).collect();
    let (mut all, mut pages) = (Vec::new(), 0);
    loop {
        let page = inspector.read(topic, &from, limit).await.unwrap();
        assert!(page.len() <= limit);
        if page.is_empty() {
            return (all, pages);
        }
        for Fetched { position, .. } in &page {
            assert_eq!(&*position.topic, topic);
            let next = from.get_mut(&position.partition).unwrap();
            assert_eq!(position.offset, *next, "in order, without gaps and repetitions");
            *next += 1;
        }
        all.extend(page);
        pages += 1;
    }
}

/// A read continues where the one before ended, in every partition, and changes the progress of no group.
pub async fn a_read_continues_in_every_partition(harness: &impl InspectorHarness) {
    let stores = harness.open_bus().await;
    let spread = |number| Record { route: number, ..record("a", number) };
    publish(&*stores.bus, (0..40).map(spread).chain([record("b", 0)])).await;
    let (all, pages) = read_all(&*stores.inspector, "a", 7).await;
    assert!(all.len() == 40 && pages >= 6, "{} records in {pages} pages", all.len());
    let mut keys: Vec<&str> = all.iter().map(|fetched| fetched.key.as_str()).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 40);
    assert!(all.iter().all(|fetched| fetched.value == "value" && fetched.damage.is_none()));
    let states = stores.inspector.topics().await.unwrap();
    assert!(states.iter().all(|state| state.groups.is_empty()), "{states:?}");

    let place = &all[39].position;
    let one = BTreeMap::from([(place.partition, place.offset)]);
    assert_eq!(stores.inspector.read("a", &one, 10).await.unwrap().len(), 1);
    assert!(stores.inspector.read("a", &BTreeMap::from([(999, 0)]), 10).await.unwrap().is_empty());
    assert!(stores.inspector.read("a", &BTreeMap::new(), 10).await.unwrap().is_empty());
    assert!(stores.inspector.read("unknown", &one, 10).await.unwrap().is_empty());
}

/// Large records come in several reads.
pub async fn a_read_is_bounded_in_records_and_bytes(harness: &impl InspectorHarness) {
    const LARGE: usize = 1 << 20;
    let stores = harness.open_bus().await;
    let large = |number| Record { value: Bytes::from(vec![7; LARGE]), route: number, ..record("large", number) };
    publish(&*stores.bus, (0..10).map(large)).await;
    let (all, pages) = read_all(&*stores.inspector, "large", 500).await;
    assert!(all.len() == 10 && pages >= 10 * LARGE / (READ_BYTES + LARGE), "{} records in {pages} pages", all.len());
    publish(&*stores.bus, (0..600).map(|number| record("many", number))).await;
    let (all, pages) = read_all(&*stores.inspector, "many", 500).await;
    assert!(all.len() == 600 && pages >= 2, "{} records in {pages} pages", all.len());
}
