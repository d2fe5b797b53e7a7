//! A partition whose commits the cluster refuses.

use std::process::Command;

use posthaste_backend_tests::servers::{Kafka, confluent_python};
use posthaste_core::Settled;
use posthaste_core::bus::{Bus, Topics};
use posthaste_core::hub_store::BusInspector;

use crate::support::{Cluster, GROUP, fetch, until};

/// Permits to describe a topic, and nothing else.
const WITHDRAW: &str = "
import sys
from confluent_kafka.admin import *
topic = (ResourceType.TOPIC, sys.argv[2], ResourcePatternType.LITERAL)
describe = AclBinding(*topic, 'User:*', '*', AclOperation.DESCRIBE, AclPermissionType.ALLOW)
admin = AdminClient({'bootstrap.servers': sys.argv[1]})
for created in admin.create_acls([describe]).values():
    created.result()
";

async fn withdraw_rights(broker: &str, topic: &str) {
    let mut command = Command::new(confluent_python());
    command.args(["-c", WITHDRAW, broker, topic]);
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_whose_commits_are_refused_stops_neither_the_others_nor_a_rebalance() {
    let broker = Kafka::start_with_acls().await;
    let cluster = Cluster::on(broker.url().to_owned(), "test.".to_owned());
    let bus = cluster.process();
    let other_topic = format!("{}-other", cluster.topic);
    cluster.publish(&bus, 0..2).await;
    let mut records: Vec<_> = (2..4).map(|number| cluster.record(number, 0, 10)).collect();
    records.iter_mut().for_each(|record| record.topic = other_topic.as_str().into());
    assert!(bus.publish(records).await.iter().all(Result::is_ok));
    let topics = Topics::Named(vec![cluster.topic.clone(), other_topic.clone()]);
    let consumer = bus.subscribe(GROUP, topics).await.unwrap();
    let fetched = fetch(&*consumer, 4).await;
    let of = |topic: &str| -> Vec<_> {
        fetched.iter().map(|record| &record.position).filter(|position| *position.topic == *topic).collect()
    };
    let (refused, accepted) = (of(&cluster.topic), of(&other_topic));
    withdraw_rights(&cluster.broker, &cluster.topic).await;

    assert_eq!(consumer.ack(&refused[..1]).await.unwrap(), [Settled::Applied]);
    until("the commit is refused", || async { consumer.flush().await.err() }).await;
    assert_eq!(consumer.renew(&accepted).await.unwrap(), [Settled::Applied; 2], "the consumer is still a member");
    assert_eq!(consumer.ack(&accepted).await.unwrap(), [Settled::Applied; 2]);
    until("the others are committed", || async {
        let topics = bus.topics().await.unwrap();
        let other = topics.iter().find(|state| state.topic == other_topic)?;
        other.groups.iter().any(|(group, watermark)| group == GROUP && *watermark == 2).then_some(())
    })
    .await;

    // Another consumer reads only that topic, so it gets the partition.
    let other_process = cluster.process();
    let other = cluster.join(&other_process).await;
    until("the partition is revoked", || async {
        consumer.renew(&refused[1..]).await.unwrap();
        (!consumer.may_start(refused[1])).then_some(())
    })
    .await;
    assert_eq!(consumer.ack(&refused[1..]).await.unwrap(), [Settled::Applied]);
    until("the partition is given up", || async {
        (consumer.renew(&refused[1..]).await.unwrap() == [Settled::LostLease]).then_some(())
    })
    .await;
    consumer.close().await.unwrap();
    other.close().await.unwrap();
}
