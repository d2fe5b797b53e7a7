//! A cluster of three brokers that loses one for good.

use posthaste_backend_tests::bus_faults::{Address, LONG_LEASE, Scene, deliveries};
use posthaste_backend_tests::processes::wait_until;
use posthaste_backend_tests::servers::KafkaCluster;
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

/// The id of the broker that leads the first partition of the topic.
fn leader(address: &Address) -> i32 {
    let consumer: BaseConsumer = ClientConfig::new().set("bootstrap.servers", brokers(address)).create().unwrap();
    let metadata = consumer.fetch_metadata(Some(&address.topic()), TIMEOUT).unwrap();
    metadata.topics()[0].partitions()[0].leader()
}
