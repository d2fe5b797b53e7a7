//! Partitions that are paused because too many records were done out of order.

use std::collections::BTreeSet;

use posthaste_core::bus::Bus;

use crate::support::{Cluster, ack, until};

/// More than are in flight before a partition is paused, and more than a consumer reads ahead.
const RECORDS: u32 = 60_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_partition_does_not_stop_the_others_and_loses_no_record() {
    let cluster = Cluster::start().await;
    let bus = cluster.process_with_partitions(2);
    for first in (0..RECORDS).step_by(5_000) {
        let records = (first..first + 5_000).map(|number| cluster.record(number, 0, 10)).collect();
        assert!(bus.publish(records).await.iter().all(Result::is_ok));
    }
    let consumer = cluster.join(&bus).await;
    // Nothing is acked, so the partition is paused at some record. Small fetches are slower than the consumer reads ahead.
    let in_flight = tokio::sync::Mutex::new(Vec::new());
    until("the partition is paused", || async {
        let fetched = consumer.fetch(200).await.unwrap();
        let mut in_flight = in_flight.lock().await;
        let is_paused = in_flight.len() > 24_000 && fetched.is_empty();
        in_flight.extend(fetched);
        is_paused.then_some(())
    })
    .await;
    let in_flight = in_flight.into_inner();
    assert!(in_flight.len() < RECORDS as usize, "it was not paused");
    let other = vec![cluster.record(RECORDS, 1, 10)];
    assert!(bus.publish(other).await.iter().all(Result::is_ok));
    let found =
        until("a record of the other partition", || async { consumer.fetch(1_000).await.unwrap().into_iter().next() })
            .await;
    assert_eq!((found.position.partition, found.key.as_str()), (1, RECORDS.to_string().as_str()));
    ack(&*consumer, [&found]).await;

    let mut numbers: BTreeSet<u32> = in_flight.iter().map(|record| record.key.parse().unwrap()).collect();
    assert_eq!(numbers.len(), in_flight.len());
    ack(&*consumer, &in_flight).await;
    while numbers.len() < RECORDS as usize {
        let fetched = until("the next records", || async {
            let fetched = consumer.fetch(1_000).await.unwrap();
            (!fetched.is_empty()).then_some(fetched)
        })
        .await;
        for record in &fetched {
            assert!(numbers.insert(record.key.parse().unwrap()), "{} is delivered twice", record.key);
        }
        ack(&*consumer, &fetched).await;
    }
    assert!(numbers.into_iter().eq(0..RECORDS));
    consumer.close().await.unwrap();
}
