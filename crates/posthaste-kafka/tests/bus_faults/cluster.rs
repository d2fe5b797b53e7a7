//! Clusters that lose a broker for good.

use std::collections::{BTreeMap, BTreeSet};

use posthaste_backend_tests::bus_faults::{Address, LONG_LEASE, PARTITIONS, Scene, deliveries};
use posthaste_backend_tests::processes::wait_until;
use posthaste_backend_tests::servers::KafkaCluster;
use posthaste_core::Settled;
use posthaste_core::bus::{Bus, Position, Record, Topics};
use posthaste_kafka::{KafkaBus, KafkaOptions};
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};

use crate::{Kafka, TIMEOUT, brokers};

/// The broker that leads the first partition is killed. Another one takes over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_is_killed_for_good_loses_and_repeats_nothing() {
    let cluster = KafkaCluster::start().await;
    let address = Address::of(cluster.url());
    let mut scene = Scene::<Kafka>::start(address.clone(), LONG_LEASE).await;
    let members = vec![scene.member(), scene.member()];
    for member in &members {
        member.wait_until("a member delivers", |entries| deliveries(entries) > 100).await;
    }
    let killed = tokio::task::spawn_blocking({
        let address = address.clone();
        move || leader(&address)
    });
    let killed = killed.await.unwrap();
    cluster.kill(killed).await;
    let published = scene.published();
    wait_until("records are published to all partitions", async || scene.published() > published + 500).await;
    scene.until_members_go_on(&members).await;
    assert_eq!(scene.finish(members, &[]).await, 0);
    let now = tokio::task::spawn_blocking(move || leader(&address)).await.unwrap();
    assert_ne!(now, killed);
}

/// The topic has no replicas, so the partitions of the broker that is killed have no leader until it comes back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_without_a_leader_do_not_stop_the_others() {
    const EACH: u64 = 5;
    let cluster = KafkaCluster::start().await;
    let address = Address::of(cluster.url());
    let topic = address.topic();
    let options = KafkaOptions {
        brokers: brokers(&address).split(',').map(str::to_owned).collect(),
        partitions: PARTITIONS,
        replication: 1,
        // The cluster wants two replicas for all others.
        acks: "1".to_owned(),
        ..KafkaOptions::default()
    };
    let bus = KafkaBus::new(options).unwrap();
    let record = |route: u64| Record {
        topic: topic.as_str().into(),
        route,
        key: route.to_string(),
        value: "value".into(),
        headers: Vec::new(),
    };
    let records: Vec<Record> = (0..EACH * u64::from(PARTITIONS)).map(record).collect();
    bus.publish(records).await.into_iter().for_each(|published| published.unwrap());
    let leaders_now = |address: &Address| {
        let address = address.clone();
        tokio::task::spawn_blocking(move || leaders(&address))
    };
    let before = leaders_now(&address).await.unwrap();
    let killed = before[0];
    cluster.kill(killed).await;
    wait_until("its partitions have no leader", async || leaders_now(&address).await.unwrap()[0] < 0).await;

    let consumer = bus.subscribe(&address.group(), Topics::Named(vec![topic])).await.unwrap();
    let read = tokio::sync::Mutex::new(BTreeMap::<u32, u64>::new());
    let wait_for = async |what: &str, partitions: BTreeSet<u32>| {
        wait_until(what, async || {
            let fetched = consumer.fetch(100).await.unwrap();
            let positions: Vec<&Position> = fetched.iter().map(|record| &record.position).collect();
            let settled = consumer.ack(&positions).await.unwrap();
            assert!(settled.iter().all(|settled| *settled == Settled::Applied));
            let mut read = read.lock().await;
            positions.iter().for_each(|position| *read.entry(position.partition).or_default() += 1);
            read.values().all(|count| *count == EACH) && read.keys().copied().eq(partitions.iter().copied())
        })
        .await;
        consumer.flush().await.unwrap();
    };
    let led = |partition: &u32| before[*partition as usize] != killed;
    wait_for("the partitions of the others are read", (0..PARTITIONS).filter(led).collect()).await;
    cluster.start_again(killed).await;
    wait_for("all partitions are read", (0..PARTITIONS).collect()).await;
}

/// The id of the broker that leads the first partition of the topic.
fn leader(address: &Address) -> i32 {
    leaders(address)[0]
}

/// The id of the broker that leads each partition of the topic, -1 if none does.
fn leaders(address: &Address) -> Vec<i32> {
    let consumer: BaseConsumer = ClientConfig::new().set("bootstrap.servers", brokers(address)).create().unwrap();
    let metadata = consumer.fetch_metadata(Some(&address.topic()), TIMEOUT).unwrap();
    metadata.topics()[0].partitions().iter().map(|partition| partition.leader()).collect()
}
