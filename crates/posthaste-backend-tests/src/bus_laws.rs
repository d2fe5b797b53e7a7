//! The laws of [`Bus`], one function each. [`bus_laws!`](crate::bus_laws!) makes a test of every one.

mod rebalance;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use posthaste_core::Settled;
use posthaste_core::bus::{Bus, Consumer, Fetched, MAX_RECORD, Position, PublishError, Record, Topics};

pub use rebalance::{
    a_paused_partition_that_is_revoked_is_read_further_by_its_next_reader,
    a_revoked_partition_is_given_up_when_its_records_are_acked_or_released,
    partitions_are_balanced_over_the_readers_of_a_group,
};

/// A short lease: a test can wait for its end.
pub const LEASE: Duration = Duration::from_millis(300);
/// A long lease: it does not end during a test.
pub const LONG_LEASE: Duration = Duration::from_secs(60);

/// The time after which a law stops waiting and fails.
const DEADLINE: Duration = Duration::from_secs(20);

/// One store that buses are opened on. Each law gets a fresh one.
#[async_trait]
pub trait BusHarness: Send + Sync {
    /// The bus under test.
    type Bus: Bus;

    /// A bus on the store, with leases of this length. Two buses share nothing but the store, like two processes.
    async fn open_with(&self, lease: Duration) -> Self::Bus;

    /// A bus with leases of [`LEASE`].
    async fn open(&self) -> Self::Bus {
        self.open_with(LEASE).await
    }

    /// Removes the records of a topic below this offset, as a retention would that ignores the groups.
    async fn remove_below(&self, topic: &str, offset: i64);

    /// Moves a group to the earliest record in all partitions of a topic, as an operator does.
    async fn reset(&self, group: &str, topic: &str);

    /// The longest text of a completed set.
    fn max_completed_text(&self) -> usize;
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
            a_refused_record_does_not_affect_the_others
            offsets_become_visible_in_order
            records_of_one_route_share_a_partition_in_order
            a_route_names_a_partition_modulo_their_number
            a_partition_has_one_reader_per_group
            an_unacked_record_is_read_again_by_the_next_reader
            an_acked_record_is_not
            an_ack_of_a_stale_generation_is_lost_lease
            an_ack_is_durable_after_a_flush_and_after_a_close
            partitions_are_balanced_over_the_readers_of_a_group
            a_revoked_partition_is_given_up_when_its_records_are_acked_or_released
            a_paused_partition_that_is_revoked_is_read_further_by_its_next_reader
            a_position_that_does_not_exist_is_not_skipped
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

/// A record that is too large is refused alone and for good. The largest one that must be accepted is accepted.
pub async fn a_refused_record_does_not_affect_the_others(harness: &impl BusHarness) {
    let bus = harness.open().await;
    let of_size = |key: &str, size: usize| {
        let value = Bytes::from(vec![b'x'; size]);
        Record { value, headers: Vec::new(), ..record("orders", 0, key.to_owned()) }
    };
    let records = ["a", "b", "c", "d"].into_iter().zip([1, MAX_RECORD - 1, MAX_RECORD, 1]);
    let results = bus.publish(records.map(|(key, size)| of_size(key, size)).collect()).await;
    let is_refused: Vec<bool> =
        results.iter().map(|result| matches!(result, Err(PublishError::Refused { .. }))).collect();
    assert_eq!(is_refused, [false, false, true, false], "{results:?}");
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 3, "{results:?}");
    let reader = bus.subscribe("group", named("orders")).await.unwrap();
    let seen = read(&*reader, 3).await;
    assert_eq!(sorted(&seen).iter().map(|fetched| fetched.key.as_str()).collect::<Vec<_>>(), ["a", "b", "d"]);
    assert_nothing(&*reader).await;
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

/// So a record can be published again to the partition that it was in.
pub async fn a_route_names_a_partition_modulo_their_number(harness: &impl BusHarness) {
    let bus = harness.open().await;
    publish(&bus, (0..64).map(|route| record("orders", route, route.to_string())).collect()).await;
    let reader = bus.subscribe("group", named("orders")).await.unwrap();
    let fetched = read(&*reader, 64).await;
    let partitions = fetched.iter().map(|fetched| fetched.position.partition + 1).max().unwrap();
    for fetched in &fetched {
        assert_eq!(fetched.position.partition, fetched.key.parse::<u32>().unwrap() % partitions, "{fetched:?}");
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
        // Before the second reader joins, because the first one then reads only its share.
        let seen = read(&*first, 40).await;
        let second = harness.open().await.subscribe(&group, named("orders")).await.unwrap();
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

/// After a flush or a close, even a reader that did not see the acks continues behind them.
pub async fn an_ack_is_durable_after_a_flush_and_after_a_close(harness: &impl BusHarness) {
    let bus = harness.open().await;
    publish(&bus, numbered("orders", 0..30)).await;
    let first = bus.subscribe("group", named("orders")).await.unwrap();
    let seen = read(&*first, 30).await;
    first.ack(&positions(&seen)[..10]).await.unwrap();
    first.flush().await.unwrap();
    // Like a killed process, the first reader does not close.
    drop(first);
    let second = harness.open_with(LONG_LEASE).await.subscribe("group", named("orders")).await.unwrap();
    let again = read(&*second, 20).await;
    assert_eq!(keys(&again), keys(&seen[10..]));
    second.ack(&positions(&again)[..10]).await.unwrap();
    second.close().await.unwrap();
    let third = harness.open().await.subscribe("group", named("orders")).await.unwrap();
    assert_eq!(keys(&read(&*third, 10).await), keys(&again[10..]));
}

/// A partition whose position does not exist is not read until its position is reset. Others are.
pub async fn a_position_that_does_not_exist_is_not_skipped(harness: &impl BusHarness) {
    let bus = harness.open_with(LONG_LEASE).await;
    publish(&bus, (0..8).map(|n| record("orders", 0, format!("orders {n}"))).collect()).await;
    publish(&bus, vec![record("others", 0, "others 0".to_owned())]).await;
    let names = || Topics::Named(vec!["orders".to_owned(), "others".to_owned()]);
    let first = bus.subscribe("group", names()).await.unwrap();
    let seen = read(&*first, 9).await;
    let done: Vec<&Position> = positions(&seen).into_iter().filter(|position| position.offset < 2).collect();
    first.ack(&done).await.unwrap();
    first.close().await.unwrap();
    harness.remove_below("orders", 5).await;
    let second = bus.subscribe("group", names()).await.unwrap();
    publish(&bus, vec![record("others", 0, "others 1".to_owned())]).await;
    assert_eq!(read(&*second, 1).await[0].key, "others 1", "the other partition is read");
    assert_nothing(&*second).await;
    second.close().await.unwrap();
    harness.reset("group", "orders").await;
    let third = bus.subscribe("group", Topics::Named(vec!["orders".to_owned()])).await.unwrap();
    let rest = read(&*third, 3).await;
    assert_eq!(rest.iter().map(|fetched| fetched.position.offset).collect::<Vec<_>>(), [5, 6, 7]);
}

/// A prefix subscription reads topics that are created later, even by another process. It may have names besides.
pub async fn a_topic_made_later_is_read_by_its_prefix(harness: &impl BusHarness) {
    let bus = harness.open().await;
    let here = bus.subscribe("here", Topics::Prefix("event.".to_owned())).await.unwrap();
    let both = Topics::PrefixAndNamed("event.".to_owned(), vec!["other.a".to_owned()]);
    let elsewhere = harness.open().await.subscribe("elsewhere", both).await.unwrap();
    assert_nothing(&*here).await;
    assert_nothing(&*elsewhere).await;
    for topic in ["event.a", "other.a", "event", "event.b", "event_c"] {
        publish(&bus, numbered(topic, 0..3)).await;
    }
    for (reader, expected) in [(here, &["event.a", "event.b"][..]), (elsewhere, &["event.a", "event.b", "other.a"])] {
        let records = read(&*reader, 3 * expected.len()).await;
        let topics: BTreeSet<&str> = records.iter().map(|fetched| &*fetched.position.topic).collect();
        assert_eq!(topics, BTreeSet::from_iter(expected.iter().copied()));
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
