//! The client sends several records in one request, and the cluster answers for all of them.

use posthaste_core::bus::{Bus, PublishError};
use rdkafka::admin::{AdminOptions, NewTopic, TopicReplication};

use crate::support::{Cluster, fetch};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_whose_limit_is_smaller_than_a_batch_refuses_only_records_that_are_too_large() {
    const RECORDS: u32 = 100;
    let cluster = Cluster::start().await;
    let small = NewTopic::new(&cluster.topic, 1, TopicReplication::Fixed(1)).set("max.message.bytes", "20000");
    cluster.admin().create_topics(&[small], &AdminOptions::new()).await.unwrap()[0].as_ref().unwrap();
    let bus = cluster.process();
    let mut records: Vec<_> = (0..RECORDS).map(|number| cluster.record(number, 0, 1_000)).collect();
    records.insert(50, cluster.record(RECORDS, 0, 30_000));
    let mut results = bus.publish(records).await;
    let large = results.remove(50);
    assert!(matches!(&large, Err(PublishError::Refused { .. })), "{large:?}");
    assert!(results.iter().all(Result::is_ok), "{results:?}");

    let consumer = cluster.join(&bus).await;
    let mut keys: Vec<u32> =
        fetch(&*consumer, RECORDS as usize).await.iter().map(|record| record.key.parse().unwrap()).collect();
    keys.sort_unstable();
    assert!(keys.into_iter().eq(0..RECORDS), "each record is there once");
}
