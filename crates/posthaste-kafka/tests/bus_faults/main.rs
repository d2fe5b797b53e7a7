//! Faults of Kafka and of the members of its groups.

mod cluster;

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use posthaste_backend_tests::bus_faults::{Address, Done, FaultyBus, PARTITIONS};
use posthaste_backend_tests::servers::{self, CrashableServer, Cutter};
use posthaste_core::Progress;
use posthaste_core::bus::Bus;
use posthaste_kafka::{KafkaBus, KafkaOptions};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

posthaste_backend_tests::bus_faults!(Kafka);

const TIMEOUT: Duration = Duration::from_secs(20);

struct Kafka;

#[async_trait]
impl FaultyBus for Kafka {
    const ACKS_ARE_DURABLE: bool = false;

    async fn shared() -> Address {
        let (broker, prefix) = servers::kafka().await;
        Address { url: broker, prefix }
    }

    async fn start() -> (CrashableServer, Cutter) {
        servers::Kafka::start_behind_proxy().await
    }

    async fn open(address: &Address, lease: Duration) -> Arc<dyn Bus> {
        let brokers: Vec<String> = brokers(address).split(',').map(str::to_owned).collect();
        let options = KafkaOptions {
            partitions: PARTITIONS,
            replication: brokers.len() as u32,
            brokers,
            client: [("session.timeout.ms".to_owned(), lease.as_millis().to_string())].into(),
            lease,
            ..KafkaOptions::default()
        };
        Arc::new(KafkaBus::new(options).unwrap())
    }

    async fn done(address: &Address) -> Done {
        let address = address.clone();
        tokio::task::spawn_blocking(move || committed(&address)).await.unwrap()
    }
}

fn brokers(address: &Address) -> &str {
    address.url.strip_prefix("kafka://").unwrap_or(&address.url)
}

/// What the group has committed.
fn committed(address: &Address) -> Done {
    let group = KafkaOptions::default().topic_prefix + "." + &address.group();
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers(address)).set("group.id", group);
    let consumer: BaseConsumer = config.create().unwrap();
    let mut list = TopicPartitionList::new();
    list.add_partition_range(&address.topic(), 0, PARTITIONS as i32 - 1);
    let deadline = Instant::now() + TIMEOUT;
    let committed = loop {
        match consumer.committed_offsets(list.clone(), TIMEOUT) {
            Ok(committed) => break committed,
            // A broker that has just started does not know the group yet.
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    };
    let mut done = Done::default();
    for element in committed.elements() {
        element.error().unwrap();
        if let Offset::Offset(watermark) = element.offset() {
            let completed =
                element.metadata().strip_prefix("1 ").expect("the metadata of a commit begins with its version");
            done.0.insert(element.partition() as u32, Progress::decode(watermark, completed).unwrap());
        }
    }
    done
}
