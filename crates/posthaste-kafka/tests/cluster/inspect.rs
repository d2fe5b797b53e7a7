//! What operators see of a real Kafka, and the reset of positions while consumers run.

use std::collections::BTreeMap;

use posthaste_core::Settled;
use posthaste_core::hub_store::{Backlog, BusInspector, ResetTo};
use posthaste_kafka::KafkaBus;
use tokio::time::Instant;

use crate::support::{Cluster, GROUP, TIMEOUT, ack, fetch, keys, until};

async fn lost(bus: &KafkaBus) -> Option<Backlog> {
    bus.backlogs().await.unwrap().into_iter().find(|backlog| backlog.is_position_lost)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_see_topics_backlogs_and_the_age_of_the_oldest_record() {
    let cluster = Cluster::start().await;
    let bus = cluster.process();
    cluster.publish(&bus, 0..3).await;
    let consumer = cluster.join(&bus).await;
    let fetched = fetch(&*consumer, 3).await;
    ack(&*consumer, &fetched[2..]).await;
    let before = bus.backlogs().await.unwrap();
    assert_eq!((before.len(), before[0].group.as_str(), before[0].topic.as_str()), (1, GROUP, cluster.topic.as_str()));
    let lags = bus.lag_of_groups().await.unwrap();
    assert!(matches!(&lags[..], [(group, _)] if group == GROUP), "{lags:?}");

    ack(&*consumer, &fetched[..1]).await;
    let topics = bus.topics().await.unwrap();
    assert_eq!((topics[0].first_offset, topics[0].next_offset), (0, 3));
    assert_eq!(topics[0].groups, [(GROUP.to_owned(), 1)]);
    let after = bus.backlogs().await.unwrap();
    assert_ne!(after[0].progress, before[0].progress, "every record that is done changes the progress");

    ack(&*consumer, &fetched[1..2]).await;
    assert!(bus.backlogs().await.unwrap().is_empty());
    assert!(bus.lag_of_groups().await.unwrap().is_empty());

    let read = bus.read(&cluster.topic, &BTreeMap::from([(0, 1)]), 10).await.unwrap();
    assert_eq!(keys(&read), ["1", "2"], "a topic is read without a group");
    assert!(bus.read("unknown", &BTreeMap::from([(0, 0)]), 10).await.unwrap().is_empty());
    assert!(bus.read(&cluster.topic, &BTreeMap::from([(9, 0)]), 10).await.unwrap().is_empty());
    consumer.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_position_that_retention_removed_waits_for_a_reset() {
    let cluster = Cluster::start().await;
    let bus = cluster.process();
    cluster.publish(&bus, 0..2).await;
    let consumer = cluster.join(&bus).await;
    let fetched = fetch(&*consumer, 2).await;
    ack(&*consumer, &fetched[..1]).await;
    cluster.publish(&bus, 2..6).await;
    // The record 1 is not done, and retention removes it.
    cluster.remove_below(4).await;
    let other = cluster.process();
    consumer.close().await.unwrap();
    let consumer = cluster.join(&other).await;
    until("the position is lost", || lost(&other)).await;
    assert!(consumer.fetch(10).await.unwrap().is_empty(), "nothing is skipped silently");

    assert_eq!(other.reset(GROUP, &cluster.topic, None, ResetTo::Earliest).await.unwrap(), 1);
    let fetched = fetch(&*consumer, 2).await;
    assert_eq!(keys(&fetched), ["4", "5"]);
    ack(&*consumer, &fetched).await;
    assert!(other.backlogs().await.unwrap().is_empty());
    assert_eq!(other.reset("unknown", &cluster.topic, None, ResetTo::Earliest).await.unwrap(), 0);
    consumer.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_that_retention_overtakes_skips_nothing() {
    const RECORDS: u32 = 80;
    let cluster = Cluster::start().await;
    let bus = cluster.process();
    // More than a consumer reads ahead.
    for number in (0..RECORDS).step_by(10) {
        cluster.publish_sized(&bus, number..number + 10, 1_000_000).await;
    }
    let consumer = cluster.join(&bus).await;
    ack(&*consumer, &fetch(&*consumer, 1).await).await;
    cluster.remove_below(i64::from(RECORDS) - 1).await;
    let mut read = 1;
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let fetched = consumer.fetch(10).await.unwrap();
        for record in &fetched {
            assert_eq!(record.position.offset, read, "records were skipped");
            read += 1;
        }
        ack(&*consumer, &fetched).await;
        if fetched.is_empty() && lost(&bus).await.is_some() {
            break;
        }
        assert!(Instant::now() < deadline, "the position is not lost after {read} records");
    }
    assert!(read < 79, "all records were read ahead");
    bus.reset(GROUP, &cluster.topic, None, ResetTo::Earliest).await.unwrap();
    assert_eq!(keys(&fetch(&*consumer, 1).await), ["79"]);
    consumer.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_by_another_process_reaches_the_consumer_whose_position_is_lost() {
    let cluster = Cluster::start().await;
    let (first, second) = (cluster.process(), cluster.process());
    cluster.publish(&first, 0..4).await;
    let consumer = cluster.join(&first).await;
    ack(&*consumer, &fetch(&*consumer, 4).await[..1]).await;
    consumer.close().await.unwrap();
    cluster.remove_below(3).await;
    let consumer = cluster.join(&first).await;
    until("the position is lost", || lost(&first)).await;
    // The other process is a member of the group too, and has no partition.
    let idle = cluster.join(&second).await;
    let reset = || async { second.reset(GROUP, &cluster.topic, Some(0), ResetTo::Latest).await.ok() };
    assert_eq!(until("the reset is accepted", reset).await, 1);
    cluster.publish(&first, 4..5).await;
    let fetched = tokio::sync::Mutex::new(Vec::new());
    until("a record after the reset", || async {
        let mut fetched = fetched.lock().await;
        for consumer in [&consumer, &idle] {
            fetched.extend(consumer.fetch(10).await.unwrap());
        }
        (!fetched.is_empty()).then_some(())
    })
    .await;
    assert_eq!(keys(&fetched.into_inner()), ["4"]);
    consumer.close().await.unwrap();
    idle.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_of_a_running_consumer_delivers_its_records_again() {
    let cluster = Cluster::start().await;
    let bus = cluster.process();
    cluster.publish(&bus, 0..3).await;
    let consumer = cluster.join(&bus).await;
    let before = fetch(&*consumer, 3).await;
    ack(&*consumer, &before[..2]).await;
    assert_eq!(bus.reset(GROUP, &cluster.topic, Some(0), ResetTo::Earliest).await.unwrap(), 1);
    let late = consumer.ack(&[&before[2].position]).await.unwrap();
    assert_eq!(late, [Settled::LostLease], "a record from before the reset counts no more");
    let again = fetch(&*consumer, 3).await;
    assert_eq!(keys(&again), ["0", "1", "2"]);
    ack(&*consumer, &again).await;
    assert!(bus.backlogs().await.unwrap().is_empty());
    consumer.close().await.unwrap();
}
