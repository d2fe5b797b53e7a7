//! The laws of a bus, on a real Kafka.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use posthaste_backend_tests::bus_laws::BusHarness;
use posthaste_backend_tests::{bus_laws, servers};
use posthaste_core::bus::{Bus, Consumer, Fetched, Position, PublishError, Record, Topics};
use posthaste_core::{Settled, StoreError, Wakeup};
use posthaste_kafka::{KafkaBus, KafkaOptions};
use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

const TIMEOUT: Duration = Duration::from_secs(20);

struct Harness {
    broker: String,
    prefix: String,
    partitions: u32,
}

impl Harness {
    async fn start(partitions: u32) -> Self {
        let (broker, prefix) = servers::kafka().await;
        Self { broker, prefix, partitions }
    }

    fn config(&self, group: &str) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.broker).set("group.id", format!("{}{group}", self.prefix));
        config
    }

    /// All partitions of a topic at this offset.
    fn list(&self, topic: &str, offset: Offset) -> TopicPartitionList {
        let mut list = TopicPartitionList::new();
        for partition in 0..self.partitions {
            list.add_partition_offset(&format!("{}{topic}", self.prefix), partition as i32, offset).unwrap();
        }
        list
    }
}

#[async_trait]
impl BusHarness for Harness {
    type Bus = Prefixed;

    async fn open_with(&self, lease: Duration) -> Prefixed {
        let options = KafkaOptions {
            brokers: vec![self.broker.clone()],
            topic_prefix: self.prefix.trim_end_matches('.').to_owned(),
            partitions: self.partitions,
            replication: 1,
            lease,
            ..KafkaOptions::default()
        };
        Prefixed { bus: KafkaBus::new(options).unwrap(), prefix: self.prefix.clone() }
    }

    async fn remove_below(&self, topic: &str, offset: i64) {
        let admin: AdminClient<DefaultClientContext> = self.config("admin").create().unwrap();
        let consumer: BaseConsumer = self.config("admin").create().unwrap();
        let mut list = TopicPartitionList::new();
        for element in self.list(topic, Offset::Beginning).elements() {
            let (_, next) = consumer.fetch_watermarks(element.topic(), element.partition(), TIMEOUT).unwrap();
            let offset = Offset::Offset(offset.min(next));
            list.add_partition_offset(element.topic(), element.partition(), offset).unwrap();
        }
        let removed = admin.delete_records(&list, &AdminOptions::new()).await.unwrap();
        removed.elements().iter().for_each(|element| element.error().unwrap());
    }

    async fn reset(&self, group: &str, topic: &str) {
        let consumer: BaseConsumer = self.config(group).create().unwrap();
        let mut list = TopicPartitionList::new();
        for element in self.list(topic, Offset::Beginning).elements() {
            let (first, _) = consumer.fetch_watermarks(element.topic(), element.partition(), TIMEOUT).unwrap();
            list.add_partition_offset(element.topic(), element.partition(), Offset::Offset(first)).unwrap();
        }
        consumer.commit(&list, CommitMode::Sync).unwrap();
    }

    fn max_completed_text(&self) -> usize {
        posthaste_kafka::MAX_COMPLETED_TEXT
    }
}

/// A bus whose topics have a prefix that its callers do not see, because the tests share one server.
struct Prefixed {
    bus: KafkaBus,
    prefix: String,
}

#[async_trait]
impl Bus for Prefixed {
    async fn publish(&self, mut records: Vec<Record>) -> Vec<Result<(), PublishError>> {
        for record in &mut records {
            record.topic = format!("{}{}", self.prefix, record.topic).into();
        }
        self.bus.publish(records).await
    }

    async fn subscribe(&self, group: &str, topics: Topics) -> Result<Box<dyn Consumer>, StoreError> {
        let prefixed = |name: &String| format!("{}{name}", self.prefix);
        let topics = match &topics {
            Topics::Named(names) => Topics::Named(names.iter().map(prefixed).collect()),
            Topics::Prefix(prefix) => Topics::Prefix(prefixed(prefix)),
            Topics::PrefixAndNamed(prefix, names) => {
                Topics::PrefixAndNamed(prefixed(prefix), names.iter().map(prefixed).collect())
            }
        };
        let consumer = self.bus.subscribe(group, topics).await?;
        Ok(Box::new(PrefixedConsumer { consumer, prefix: self.prefix.clone() }))
    }
}

struct PrefixedConsumer {
    consumer: Box<dyn Consumer>,
    prefix: String,
}

impl PrefixedConsumer {
    fn prefixed(&self, positions: &[&Position]) -> Vec<Position> {
        let prefixed = |position: &&Position| Position {
            topic: format!("{}{}", self.prefix, position.topic).into(),
            ..Position::clone(position)
        };
        positions.iter().map(prefixed).collect()
    }
}

#[async_trait]
impl Consumer for PrefixedConsumer {
    async fn fetch(&self, limit: usize) -> Result<Vec<Fetched>, StoreError> {
        let mut fetched = self.consumer.fetch(limit).await?;
        for one in &mut fetched {
            one.position.topic = Arc::from(one.position.topic.strip_prefix(&*self.prefix).unwrap());
        }
        Ok(fetched)
    }

    async fn ack(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        self.consumer.ack(&self.prefixed(positions).iter().collect::<Vec<_>>()).await
    }

    async fn flush(&self) -> Result<(), StoreError> {
        self.consumer.flush().await
    }

    fn release(&self, positions: &[&Position]) {
        self.consumer.release(&self.prefixed(positions).iter().collect::<Vec<_>>());
    }

    fn may_start(&self, position: &Position) -> bool {
        self.consumer.may_start(&self.prefixed(&[position])[0])
    }

    async fn renew(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        self.consumer.renew(&self.prefixed(positions).iter().collect::<Vec<_>>()).await
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.consumer.close().await
    }

    fn lease(&self) -> Duration {
        self.consumer.lease()
    }

    fn wakeup(&self) -> &Wakeup {
        self.consumer.wakeup()
    }

    fn revocations(&self) -> &Wakeup {
        self.consumer.revocations()
    }
}

mod with_one_partition {
    use super::*;

    bus_laws!(Harness::start(1).await);
}

mod with_four_partitions {
    use super::*;

    bus_laws!(Harness::start(4).await);
}
