//! A cluster that does not answer for a while.

use std::time::Duration;

use posthaste_backend_tests::servers::Kafka;
use posthaste_core::Settled;
use posthaste_core::bus::Consumer;
use tokio::time::{Instant, sleep};

use crate::support::{Cluster, ack, fetch};

const LEASE: Duration = Duration::from_secs(2);
/// Much longer than a lease: the client may need several seconds to find that its connections are gone.
const SESSION: (&str, &str) = ("session.timeout.ms", "60000");

/// The polling thread waits for the cluster, and a renewal waits for the polling thread. So the consumer is used all the
/// time, and the cluster keeps its partitions until the session ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_keeps_its_partitions_while_the_cluster_does_not_answer_for_longer_than_a_lease() {
    let (_kafka, proxy) = Kafka::start_behind_proxy().await;
    let cluster = Cluster::on(proxy.url().trim_start_matches("kafka://").to_owned(), "slow.".to_owned());
    let bus = cluster.process_with_lease(LEASE, &[SESSION]);
    cluster.publish(&bus, 0..1).await;
    let consumer = cluster.join(&bus).await;
    let fetched = fetch(&*consumer, 1).await;
    renew_until(&*consumer, &fetched[0].position, Instant::now() + LEASE / 2).await;

    proxy.take_away().await;
    let away = async {
        sleep(2 * LEASE).await;
        proxy.restore();
    };
    tokio::join!(away, renew_until(&*consumer, &fetched[0].position, Instant::now() + 3 * LEASE));
    ack(&*consumer, &fetched).await;
    assert!(consumer.fetch(10).await.unwrap().is_empty(), "the record was handed out again");
}

/// Renews as the engine does: again when it is time, and sooner after a failure.
async fn renew_until(consumer: &dyn Consumer, position: &posthaste_core::bus::Position, end: Instant) {
    let mut is_renewed = false;
    while Instant::now() < end || !is_renewed {
        let renewed = consumer.renew(&[position]).await;
        is_renewed = renewed.is_ok();
        if let Ok(renewed) = renewed {
            assert_eq!(renewed, [Settled::Applied]);
        }
        sleep(if is_renewed { LEASE / 3 } else { LEASE / 30 }).await;
    }
}
