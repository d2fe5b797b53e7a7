//! Commits during a rebalance.

use posthaste_core::Settled;
use posthaste_core::bus::Bus;
use posthaste_core::hub_store::BusInspector;

use crate::support::{Cluster, GROUP, fetch, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acks_are_committed_while_a_revoked_partition_waits_for_its_records_in_flight() {
    let cluster = Cluster::start().await;
    let bus = cluster.process_with_partitions(2);
    let records = (0..2).map(|number| cluster.record(number, u64::from(number), 10)).collect();
    assert!(bus.publish(records).await.iter().all(Result::is_ok));
    let consumer = cluster.join(&bus).await;
    let fetched = fetch(&*consumer, 2).await;
    let other_process = cluster.process();
    let other = cluster.join(&other_process).await;
    let is_revoked = || async { fetched.iter().find(|record| !consumer.may_start(&record.position)) };
    let revoked = until("a partition is revoked", is_revoked).await;
    let kept = fetched.iter().find(|record| consumer.may_start(&record.position)).unwrap();

    assert_eq!(consumer.ack(&[&kept.position]).await.unwrap(), [Settled::Applied]);
    until("the ack of the other partition is committed", || async {
        // A consumer that is not used leaves the group.
        consumer.renew(&[&revoked.position]).await.unwrap();
        let topics = bus.topics().await.unwrap();
        let kept = topics.iter().find(|state| state.partition == kept.position.partition)?;
        kept.groups.iter().any(|(group, watermark)| group == GROUP && *watermark == 1).then_some(())
    })
    .await;
    assert_eq!(consumer.ack(&[&revoked.position]).await.unwrap(), [Settled::Applied], "the revocation still waits");
    until("all is done", || async { bus.backlogs().await.unwrap().is_empty().then_some(()) }).await;
    assert!(other.fetch(10).await.unwrap().is_empty(), "nothing is delivered twice");
    consumer.close().await.unwrap();
    other.close().await.unwrap();
}
