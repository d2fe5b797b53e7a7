//! The bus on Kafka.
//!
//! [`KafkaBus`] implements [`Bus`] by librdkafka. A producer is shared by all publishers
//! (`producer.rs`). Each consumer has a thread of its own, which polls the client, assigns partitions and commits
//! (`poller.rs`); the handle that the engine uses shares its state (`consumer.rs`).
//!
//! A commit carries the watermark of a partition, and the offsets above it that are done as the text of the commit's
//! metadata (`commit.rs`).

mod check;
mod commit;
mod consumer;
mod context;
mod errors;
mod inspect;
mod options;
mod poller;
mod positions;
mod producer;
mod topics;
mod uncommitted;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::bus::{Bus, Consumer, PublishError, Record, Topics};

use consumer::GroupConsumer;
use errors::{failed, not_created};
use inspect::Groups;
use producer::Producer;
use topics::TopicCreator;

pub use commit::MAX_COMPLETED_TEXT;
pub use options::{KafkaOptions, OptionsError};

/// How long a consumer waits for the creation of its topics before it joins its group.
const CREATE_TIMEOUT: Duration = Duration::from_secs(1);

/// The bus on a Kafka cluster.
#[derive(Clone)]
pub struct KafkaBus(Arc<Inner>);

struct Inner {
    options: KafkaOptions,
    producer: Producer,
    topics: Arc<TopicCreator>,
    groups: Groups,
}

impl KafkaBus {
    /// A bus on the cluster that the options name. The cluster is contacted when the bus is used.
    pub fn new(options: KafkaOptions) -> Result<Self, StoreError> {
        let topics = TopicCreator::new(&options).map_err(not_created)?;
        let producer = Producer::new(&options).map_err(not_created)?;
        Ok(Self(Arc::new(Inner { options, producer, topics: Arc::new(topics), groups: Groups::default() })))
    }
}

impl KafkaBus {
    /// Creates the topics that a group reads, if they do not exist.
    async fn create_topics(self, group: String, names: Vec<String>) {
        let names = names.iter().map(|name| name.as_str().into()).collect();
        for (topic, partitions) in self.0.topics.partitions_of(names).await {
            // The consumer finds the topic when a publish has created it.
            if let Err(error) = partitions {
                tracing::warn!(group, topic = &*topic, %error, "the topic of a group could not be created yet");
            }
        }
    }
}

#[async_trait]
impl Bus for KafkaBus {
    async fn publish(&self, records: Vec<Record>) -> Vec<Result<(), PublishError>> {
        let topics = records.iter().map(|record| Arc::clone(&record.topic)).collect();
        let partitions = self.0.topics.partitions_of(topics).await;
        self.0.producer.publish(records, &partitions, &self.0.topics).await
    }

    async fn subscribe(&self, group: &str, topics: Topics) -> Result<Box<dyn Consumer>, StoreError> {
        if !topics.names().is_empty() {
            // The cluster may be away. The start of a server does not wait for it.
            let creating = tokio::spawn(self.clone().create_topics(group.to_owned(), topics.names().to_vec()));
            let _ = tokio::time::timeout(CREATE_TIMEOUT, creating).await;
        }
        let consumer = GroupConsumer::join(&self.0.options, group, &topics)?;
        let added = self.0.groups.add(&self.0.options, consumer.member());
        added.map_err(|error| failed("join a Kafka group", error))?;
        Ok(Box::new(consumer))
    }
}
