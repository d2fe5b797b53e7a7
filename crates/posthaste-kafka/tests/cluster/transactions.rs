//! Topics to which other programs write in transactions. The cluster ends each of them with a record of its own, which no
//! consumer sees, and a consumer does not see the records of a transaction that was aborted.

use posthaste_core::hub_store::BusInspector;
use rdkafka::ClientConfig;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};

use crate::support::{Cluster, GROUP, TIMEOUT, ack, fetch, keys};

const TRANSACTIONS: u32 = 200;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_gaps_that_transactions_leave_between_offsets_do_not_stop_a_group() {
    let cluster = Cluster::start().await;
    let bus = cluster.process();
    cluster.publish(&bus, 0..1).await;
    let (broker, topic) = (cluster.broker.clone(), cluster.topic.clone());
    tokio::task::spawn_blocking(move || write_in_transactions(&broker, &topic)).await.unwrap();
    cluster.publish(&bus, TRANSACTIONS..TRANSACTIONS + 1).await;

    let expected: Vec<String> =
        (0..=TRANSACTIONS).filter(|number| !is_aborted(*number)).map(|number| number.to_string()).collect();
    let consumer = cluster.join(&bus).await;
    let fetched = fetch(&*consumer, expected.len()).await;
    assert_eq!(keys(&fetched), expected);
    ack(&*consumer, &fetched).await;
    assert!(bus.backlogs().await.unwrap().iter().all(|backlog| backlog.group != GROUP), "all is done");
}

fn is_aborted(number: u32) -> bool {
    number % 10 == 5
}

/// One transaction for each number.
fn write_in_transactions(broker: &str, topic: &str) {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", broker).set("transactional.id", topic);
    let producer: BaseProducer = config.create().unwrap();
    producer.init_transactions(TIMEOUT).unwrap();
    for number in 1..TRANSACTIONS {
        producer.begin_transaction().unwrap();
        let key = number.to_string();
        producer.send(BaseRecord::to(topic).partition(0).key(&key).payload("value")).unwrap();
        match is_aborted(number) {
            true => producer.flush(TIMEOUT).and_then(|()| producer.abort_transaction(TIMEOUT)).unwrap(),
            false => producer.commit_transaction(TIMEOUT).unwrap(),
        }
    }
}
