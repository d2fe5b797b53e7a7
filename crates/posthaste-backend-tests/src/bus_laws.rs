//! The laws of [`Bus`], one function each. [`bus_laws!`](crate::bus_laws!) makes a test of every one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use posthaste_core::Settled;
use posthaste_core::bus::{Bus, Consumer, Fetched, Position, Record, Topics};

/// The lease of a bus under test: long enough to be renewed in time, short enough for a test to wait for its end.
pub const LEASE: Duration = Duration::from_millis(300);

/// The time after which a law stops waiting and fails.
const DEADLINE: Duration = Duration::from_secs(20);

/// One store that buses are opened on. Each law gets a fresh one.
#[async_trait]
pub trait BusHarness: Send + Sync {
    /// The bus under test.
    type Bus: Bus;

    /// A bus on the store, with leases of [`LEASE`]. Two buses share nothing but the store, like two processes.
    async fn open(&self) -> Self::Bus;
}

/// Expands to one test per law of [`Bus`](posthaste_core::bus::Bus), each on the fresh harness that the expression
/// makes: `bus_laws!(Harness::start().await)`.
#[macro_export]
macro_rules! bus_laws {
    ($harness:expr) => {
        $crate::bus_laws!(
            $harness =>
            a_published_record_is_read_by_every_group
            publish_acks_each_record_once_durable
            offsets_become_visible_in_order
            records_of_one_route_share_a_partition_in_order
            a_partition_has_one_reader_per_group
            an_unacked_record_is_read_again_by_the_next_reader
            an_acked_record_is_not
            an_ack_of_a_stale_generation_is_lost_lease
            a_topic_made_later_is_read_by_its_prefix
        );
    };
    ($harness:expr => $($law:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $law() {
                $crate::bus_laws::$law(&$harness).await;
            }
        )*
    };
}

/// Every group reads each record once and complete. A new group starts at the earliest record.
pub async fn a_published_record_is_read_by_every_group(harness: &impl BusHarness) {
    let bus = harness.open().await;
    publish(&bus, numbered("orders", 0..30)).await;
    let early = bus.subscribe("early", named("orders")).await.unwrap();
    let mut seen_early = read(&*early, 30).await;
    publish(&bus, numbered("orders", 30..60)).await;
    seen_early.extend(read(&*early, 30).await);
    let late = harness.open().await.subscribe("late", named("orders")).await.unwrap();
    let seen_late = read(&*late, 60).await;
    let published = keys_of(&numbered("orders", 0..60));
    assert_eq!(keys(&seen_early), published);
    assert_eq!(keys(&seen_late), published, "a new group starts at the earliest record");
    for fetched in seen_late {
        assert_eq!(fetched.value, Bytes::from(format!("value of {}", fetched.key)));
        assert_eq!(fetched.headers, [("key".to_owned(), fetched.key)]);
    }
    assert_nothing(&*early).await;
}

/// A publish returns one result per record. After `Ok`, other processes can read the record.
pub async fn publish_acks_each_record_once_durable(harness: &impl BusHarness) {
    let bus = harness.open().await;
    assert!(bus.publish(Vec::new()).await.is_empty());
    let reader = harness.open().await.subscribe("group", Topics::Prefix(String::new())).await.unwrap();
    let mut records = numbered("orders", 0..100);
    records.extend(numbered("payments", 0..100));
    let answers = bus.publish(records.clone()).await;
    assert_eq!(answers.len(), records.len());
    assert!(answers.iter().all(Result::is_ok));
    drop(bus);
    assert_eq!(keys(&read(&*reader, 200).await), keys_of(&records), "other processes read every acked record");
}

/// A reader that has seen offset n never sees a new record with an offset ≤ n, even with several publishers at once.
pub async fn offsets_become_visible_in_order(harness: &impl BusHarness) {
    const PUBLISHERS: u64 = 4;
    const BATCHES: u64 = 25;
    const BATCH: u64 = 8;
    let reader = harness.open().await.subscribe("during", Topics::Prefix("t".to_owned())).await.unwrap();
    let mut publishers = tokio::task::JoinSet::new();
    for publisher in 0..PUBLISHERS {
        let bus = harness.open().await;
        publishers.spawn(async move {
            for batch in 0..BATCHES {
                // Each batch has both topics, in alternating order, so that a deadlock or an interleaving shows.
                let topics = if (publisher + batch) % 2 == 0 { ["t1", "t2"] } else { ["t2", "t1"] };
                let record = |n| record(topics[n as usize % 2], n / 2, format!("{publisher}.{batch}.{n}"));
                publish(&bus, (0..BATCH).map(record).collect()).await;
            }
        });
    }
    let count = (PUBLISHERS * BATCHES * BATCH) as usize;
    // While the publishers run, the reader gets every offset in order, and none late.
    let during = offsets_without_gap(&read(&*reader, count).await);
    while let Some(publisher) = publishers.join_next().await {
        publisher.unwrap();
    }
    let after = harness.open().await.subscribe("after", Topics::Prefix("t".to_owned())).await.unwrap();
    assert_eq!(offsets_without_gap(&read(&*after, count).await), during);
    assert_nothing(&*reader).await;
}

/// Records of one route are in one partition and in order, within one publish call and across calls.
pub async fn records_of_one_route_share_a_partition_in_order(harness: &impl BusHarness) {
    let bus = harness.open().await;
    for round in 0..5 {
        let route_of = |n: u64| n % 7;
        publish(
            &bus,
            (0..35).map(|n| record("orders", route_of(n), format!("{}/{round}/{n:02}", route_of(n)))).collect(),
        )
        .await;
    }
    let reader = bus.subscribe("group", named("orders")).await.unwrap();
    let mut routes: BTreeMap<String, Vec<Fetched>> = BTreeMap::new();
    for fetched in read(&*reader, 175).await {
        let route = fetched.key.split('/').next().unwrap().to_owned();
        routes.entry(route).or_default().push(fetched);
    }
    assert_eq!(routes.len(), 7);
    for records in routes.values() {
        assert!(records.iter().all(|fetched| fetched.position.partition == records[0].position.partition));
        assert!(records.is_sorted_by_key(|fetched| fetched.position.offset));
        assert!(records.is_sorted_by_key(|fetched| &fetched.key), "in the order of publishing");
    }
}

/// A second reader gets the partition when the first closes or its lease ends.
pub async fn a_partition_has_one_reader_per_group(harness: &impl BusHarness) {
    let bus = harness.open().await;
    publish(&bus, numbered("orders", 0..40)).await;
    let published = keys_of(&numbered("orders", 0..40));
    let give_up = Instant::now() + DEADLINE;
    let mut round = 0;
    // If the machine pauses the test for longer than a lease, the round proves nothing and is repeated.
    let (first, second) = loop {
        assert!(Instant::now() < give_up, "no lease was renewed for two lease times");
        round += 1;
        let group = format!("group {round}");
        let first = bus.subscribe(&group, named("orders")).await.unwrap();
        let second = harness.open().await.subscribe(&group, named("orders")).await.unwrap();
        let seen = read(&*first, 40).await;
        if second_reads_nothing_while_first_renews(&*first, &*second, &positions(&seen)).await {
            break (first, second);
        }
    };
    first.close().await.unwrap();
    assert_eq!(keys(&read(&*second, 40).await), published, "the partitions are free when the first reader closes");
    assert!(first.fetch(10).await.unwrap().is_empty(), "a closed reader reads nothing");
    // Like a killed process, the second reader neither closes nor renews.
    drop(second);
    let third = harness.open().await.subscribe(&format!("group {round}"), named("orders")).await.unwrap();
    assert_eq!(keys(&read(&*third, 40).await), published, "the partitions are free when the lease has ended");
}

/// Returns false if the first consumer's lease may have ended meanwhile.
async fn second_reads_nothing_while_first_renews(
    first: &dyn Consumer,
    second: &dyn Consumer,
    positions: &[&Position],
) -> bool {
    let started = Instant::now();
    while started.elapsed() < 2 * LEASE {
        let renewed_at = Instant::now();
        let renewed = first.renew(positions).await.unwrap();
        if renewed.contains(&Settled::LostLease) {
            return false;
        }
        let stolen = second.fetch(100).await.unwrap();
        if renewed_at.elapsed() >= first.lease() {
            return false;
        }
        assert!(stolen.is_empty(), "two readers of one partition in one group");
        pause().await;
    }
    true
}

/// The next reader gets an unacked record at the same offset, with a later generation.
pub async fn an_unacked_record_is_read_again_by_the_next_reader(harness: &impl BusHarness) {
    let bus = harness.open().await;
    publish(&bus, numbered("orders", 0..20)).await;
    let first = bus.subscribe("group", named("orders")).await.unwrap();
    let seen = read(&*first, 20).await;
    assert_nothing(&*first).await;
    first.close().await.unwrap();
    let second = harness.open().await.subscribe("group", named("orders")).await.unwrap();
    let again = read(&*second, 20).await;
    assert_eq!(keys(&again), keys(&seen));
    for (again, before) in sorted(&again).iter().zip(sorted(&seen)) {
        assert_eq!(again.position.offset, before.position.offset);
        assert!(again.position.generation > before.position.generation);
    }
}

/// The next reader does not get an acked record, even if it was acked out of order.
pub async fn an_acked_record_is_not(harness: &impl BusHarness) {
    let bus = harness.open().await;
    publish(&bus, numbered("orders", 0..60)).await;
    let first = bus.subscribe("group", named("orders")).await.unwrap();
    let seen = read(&*first, 60).await;
    // The first and then every third record stay unacked. The rest is acked backwards in two calls, the second
    // repeated.
    let (open, done): (Vec<_>, Vec<_>) = seen.iter().enumerate().partition(|(index, _)| index % 3 == 0);
    let done: Vec<&Position> = done.iter().rev().map(|(_, fetched)| &fetched.position).collect();
    for part in [&done[..15], &done[15..], &done[15..]] {
        assert_eq!(first.ack(part).await.unwrap(), vec![Settled::Applied; part.len()]);
    }
    assert!(first.ack(&[]).await.unwrap().is_empty());
    assert_nothing(&*first).await;
    first.close().await.unwrap();
    let second = harness.open().await.subscribe("group", named("orders")).await.unwrap();
    let again = read(&*second, open.len()).await;
    let open: BTreeSet<String> = open.iter().map(|(_, fetched)| fetched.key.clone()).collect();
    assert_eq!(keys(&again), open);
    assert_nothing(&*second).await;
    assert_eq!(second.ack(&positions(&again)).await.unwrap(), vec![Settled::Applied; again.len()]);
    second.close().await.unwrap();
    let third = bus.subscribe("group", named("orders")).await.unwrap();
    assert_nothing(&*third).await;
    publish(&bus, numbered("orders", 60..61)).await;
    assert_eq!(read(&*third, 1).await[0].key, "orders 060");
}

/// An ack with a stale generation changes nothing, whichever consumer sends it.
pub async fn an_ack_of_a_stale_generation_is_lost_lease(harness: &impl BusHarness) {
    let bus = harness.open().await;
    publish(&bus, numbered("orders", 0..12)).await;
    let first = bus.subscribe("group", named("orders")).await.unwrap();
    let seen = read(&*first, 12).await;
    let stale = positions(&seen);
    // The first reader stops renewing. The second gets the partitions when the lease has ended.
    let second = harness.open().await.subscribe("group", named("orders")).await.unwrap();
    let again = read(&*second, 12).await;
    assert_eq!(first.ack(&stale).await.unwrap(), vec![Settled::LostLease; 12]);
    assert_eq!(first.renew(&stale).await.unwrap(), vec![Settled::LostLease; 12]);
    assert_eq!(second.ack(&stale).await.unwrap(), vec![Settled::LostLease; 12], "not even if the new owner sends it");
    // The second reader closes, so that only a stale ack could prevent the records from being read again.
    second.close().await.unwrap();
    let third = harness.open().await.subscribe("group", named("orders")).await.unwrap();
    let third_time = read(&*third, 12).await;
    assert_eq!(keys(&third_time), keys(&again), "a stale ack changes nothing");
    let mut mixed = positions(&third_time);
    mixed.insert(1, stale[0]);
    let answers = third.ack(&mixed).await.unwrap();
    let lost: Vec<usize> = (0..answers.len()).filter(|&index| answers[index] == Settled::LostLease).collect();
    assert_eq!(lost, [1], "results are in the order of the positions");
}

/// A prefix subscription reads topics that are created later, even by another process.
pub async fn a_topic_made_later_is_read_by_its_prefix(harness: &impl BusHarness) {
    let bus = harness.open().await;
    let here = bus.subscribe("here", Topics::Prefix("event.".to_owned())).await.unwrap();
    let elsewhere = harness.open().await.subscribe("elsewhere", Topics::Prefix("event.".to_owned())).await.unwrap();
    assert_nothing(&*here).await;
    assert_nothing(&*elsewhere).await;
    for topic in ["event.a", "other.a", "event", "event.b", "event_c"] {
        publish(&bus, numbered(topic, 0..3)).await;
    }
    for reader in [here, elsewhere] {
        let topics: BTreeSet<Arc<str>> =
            read(&*reader, 6).await.iter().map(|fetched| Arc::clone(&fetched.position.topic)).collect();
        assert_eq!(topics, BTreeSet::from(["event.a".into(), "event.b".into()]));
        assert_nothing(&*reader).await;
    }
}

fn record(topic: &str, route: u64, key: String) -> Record {
    let value = Bytes::from(format!("value of {key}"));
    let headers = vec![("key".to_owned(), key.clone())];
    Record { topic: topic.into(), route, key, value, headers }
}

fn numbered(topic: &str, numbers: std::ops::Range<u64>) -> Vec<Record> {
    numbers.map(|n| record(topic, n, format!("{topic} {n:03}"))).collect()
}

async fn publish(bus: &impl Bus, records: Vec<Record>) {
    for answer in bus.publish(records).await {
        answer.unwrap();
    }
}

fn named(topic: &str) -> Topics {
    Topics::Named(vec![topic.to_owned()])
}

/// Fetches until it has exactly this many records.
async fn read(consumer: &dyn Consumer, count: usize) -> Vec<Fetched> {
    let deadline = Instant::now() + DEADLINE;
    let mut seen = Vec::new();
    while seen.len() < count {
        assert!(Instant::now() < deadline, "{} of {count} records came within {DEADLINE:?}", seen.len());
        // Fewer than are available, so that a broken limit shows.
        let fetched = consumer.fetch(7).await.unwrap();
        assert!(fetched.len() <= 7, "{} records for a limit of 7", fetched.len());
        if fetched.is_empty() {
            pause().await;
        }
        seen.extend(fetched);
    }
    assert_eq!(seen.len(), count);
    seen
}

/// Sleeps between two checks of a state that other tasks change.
async fn pause() {
    tokio::time::sleep(Duration::from_millis(5)).await;
}

async fn assert_nothing(consumer: &dyn Consumer) {
    let fetched = consumer.fetch(100).await.unwrap();
    assert!(fetched.is_empty(), "no more records were expected: {:?}", keys(&fetched));
}

fn offsets_without_gap(seen: &[Fetched]) -> BTreeMap<(Arc<str>, u32), Vec<String>> {
    let mut partitions: BTreeMap<(Arc<str>, u32), Vec<String>> = BTreeMap::new();
    for fetched in seen {
        let place = (Arc::clone(&fetched.position.topic), fetched.position.partition);
        let keys = partitions.entry(place).or_default();
        assert_eq!(fetched.position.offset, keys.len() as i64, "a gap or a late offset in {:?}", fetched.position);
        keys.push(fetched.key.clone());
    }
    partitions
}

fn keys(seen: &[Fetched]) -> BTreeSet<String> {
    let keys: BTreeSet<String> = seen.iter().map(|fetched| fetched.key.clone()).collect();
    assert_eq!(keys.len(), seen.len(), "a record was fetched twice");
    keys
}

fn keys_of(records: &[Record]) -> BTreeSet<String> {
    records.iter().map(|record| record.key.clone()).collect()
}

fn positions(seen: &[Fetched]) -> Vec<&Position> {
    seen.iter().map(|fetched| &fetched.position).collect()
}

fn sorted(seen: &[Fetched]) -> Vec<&Fetched> {
    let mut sorted: Vec<&Fetched> = seen.iter().collect();
    sorted.sort_by(|left, right| left.key.cmp(&right.key));
    sorted
}
