use std::future::Future;
use std::time::Duration;

use posthaste_backend_tests::servers;
use posthaste_core::Settled;
use posthaste_core::bus::{Bus, Consumer, Fetched, Position, Record, Topics};
use posthaste_kafka::{KafkaBus, KafkaOptions};
use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use tokio::time::Instant;

pub const TIMEOUT: Duration = Duration::from_secs(30);
pub const GROUP: &str = "readers";

pub struct Cluster {
    pub broker: String,
    prefix: String,
    pub topic: String,
}

impl Cluster {
    pub async fn start() -> Self {
        let (broker, prefix) = servers::kafka().await;
        Self::on(broker, prefix)
    }

    /// A cluster that has this broker.
    pub fn on(broker: String, prefix: String) -> Self {
        let topic = format!("{prefix}orders");
        Self { broker, prefix, topic }
    }

    /// A process that uses the cluster.
    pub fn process(&self) -> KafkaBus {
        self.process_with(&[])
    }

    /// A process that passes these settings to the client library.
    pub fn process_with(&self, settings: &[(&str, &str)]) -> KafkaBus {
        KafkaBus::new(self.options(settings)).unwrap()
    }

    /// A process whose consumers leave their group when they are not used for this long. It passes these settings to the
    /// client library.
    pub fn process_with_lease(&self, lease: Duration, settings: &[(&str, &str)]) -> KafkaBus {
        KafkaBus::new(KafkaOptions { lease, ..self.options(settings) }).unwrap()
    }

    fn options(&self, settings: &[(&str, &str)]) -> KafkaOptions {
        KafkaOptions {
            client: settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            brokers: vec![self.broker.clone()],
            topic_prefix: self.prefix.trim_end_matches('.').to_owned(),
            partitions: 1,
            replication: 1,
            ..KafkaOptions::default()
        }
    }

    pub async fn join(&self, bus: &KafkaBus) -> Box<dyn Consumer> {
        bus.subscribe(GROUP, Topics::Named(vec![self.topic.clone()])).await.unwrap()
    }

    pub async fn publish(&self, bus: &KafkaBus, numbers: std::ops::Range<u32>) {
        self.publish_sized(bus, numbers, 10).await;
    }

    pub async fn publish_sized(&self, bus: &KafkaBus, numbers: std::ops::Range<u32>, size: usize) {
        let records = numbers.map(|number| self.record(number, 0, size)).collect();
        bus.publish(records).await.into_iter().for_each(|published| published.unwrap());
    }

    /// A record for this partition, of bytes that cannot be compressed.
    pub fn record(&self, number: u32, partition: u64, size: usize) -> Record {
        let value = std::iter::repeat_with(|| fastrand::u8(..)).take(size).collect();
        let (topic, key) = (self.topic.as_str().into(), number.to_string());
        Record { topic, route: partition, key, value, headers: Vec::new() }
    }

    pub fn admin(&self) -> AdminClient<DefaultClientContext> {
        ClientConfig::new().set("bootstrap.servers", &self.broker).create().unwrap()
    }

    /// Removes the records below this offset, as retention does.
    pub async fn remove_below(&self, offset: i64) {
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(&self.topic, 0, Offset::Offset(offset)).unwrap();
        self.admin().delete_records(&list, &AdminOptions::new()).await.unwrap();
    }
}

pub async fn ack<'a>(consumer: &dyn Consumer, fetched: impl IntoIterator<Item = &'a Fetched>) {
    let positions: Vec<&Position> = fetched.into_iter().map(|fetched| &fetched.position).collect();
    assert_eq!(consumer.ack(&positions).await.unwrap(), vec![Settled::Applied; positions.len()]);
    consumer.flush().await.unwrap();
}

/// Calls until there is something.
pub async fn until<T, F: Future<Output = Option<T>>>(what: &str, look: impl Fn() -> F) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Fetches this many records.
pub async fn fetch(consumer: &dyn Consumer, count: usize) -> Vec<Fetched> {
    let fetched = tokio::sync::Mutex::new(Vec::new());
    until(&format!("{count} records"), || async {
        let mut fetched = fetched.lock().await;
        fetched.extend(consumer.fetch(count).await.unwrap());
        (fetched.len() >= count).then_some(())
    })
    .await;
    fetched.into_inner()
}

pub fn keys(fetched: &[Fetched]) -> Vec<&str> {
    fetched.iter().map(|record| record.key.as_str()).collect()
}
