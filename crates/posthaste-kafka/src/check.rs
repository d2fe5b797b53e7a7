use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use posthaste_core::{FaultKind, StoreError};
use rdkafka::admin::{AdminOptions, ResourceSpecifier};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;

use crate::context::LoggingContext;
use crate::errors::failed;
use crate::positions::TIMEOUT;
use crate::{KafkaBus, KafkaOptions};

const CHECKING: &str = "check Kafka";
/// How long a client may take to tell why no broker answers.
const REASON_TIMEOUT: Duration = Duration::from_secs(4);
const POLL: Duration = Duration::from_millis(20);
/// How many topics a message names.
const MAX_NAMED: usize = 3;

/// What the cluster has, as far as it matters here.
struct Cluster {
    brokers: usize,
    /// Our topics: the number of partitions, and on how many brokers each is stored at least.
    topics: BTreeMap<String, (usize, usize)>,
}

impl KafkaBus {
    /// Contacts the cluster and describes it. Fails with what is wrong: it cannot be reached, it is too small for the
    /// configured replication, or topics have other settings than the configuration.
    pub async fn check(&self) -> Result<String, StoreError> {
        let cluster = match self.cluster().await {
            Ok(cluster) => cluster,
            Err(error) => {
                let options = self.0.options.clone();
                let reason = tokio::task::spawn_blocking(move || reason(&options)).await.ok().flatten();
                let (brokers, reason) = (self.0.options.brokers.join(","), reason.unwrap_or(error.to_string()));
                let why = format!(
                    "no broker of {brokers} answers ({reason}): check bus.url, and [bus.kafka] for TLS and SASL"
                );
                return Err(StoreError::new(CHECKING, FaultKind::Transient, why));
            }
        };
        let mut wrong = self.wrong_settings(&cluster);
        wrong.extend(self.small_topics(&cluster).await?);
        match wrong.is_empty() {
            true => Ok(format!("{} brokers, {} topics", cluster.brokers, cluster.topics.len())),
            false => Err(StoreError::new(CHECKING, FaultKind::Permanent, wrong.join("; "))),
        }
    }

    async fn cluster(&self) -> Result<Cluster, KafkaError> {
        let (admin, options) = (self.0.topics.admin(), self.0.options.clone());
        let asked = tokio::task::spawn_blocking(move || {
            let metadata = admin.inner().fetch_metadata(None, TIMEOUT)?;
            let ours = metadata.topics().iter().filter(|topic| options.is_ours(topic.name()));
            let topics = ours.map(|topic| {
                let replicas = topic.partitions().iter().map(|partition| partition.replicas().len()).min();
                (topic.name().to_owned(), (topic.partitions().len(), replicas.unwrap_or_default()))
            });
            Ok(Cluster { brokers: metadata.brokers().len(), topics: topics.collect() })
        });
        asked.await.unwrap_or_else(|_| Err(KafkaError::Canceled))
    }

    fn wrong_settings(&self, cluster: &Cluster) -> Vec<String> {
        let (partitions, replication) = (self.0.options.partitions as usize, self.0.options.replication as usize);
        let mut wrong = Vec::new();
        if cluster.brokers < replication {
            let brokers = cluster.brokers;
            wrong.push(format!(
                "bus.replication is {replication}, but the cluster has {brokers} brokers: no topic can be created"
            ));
        }
        let named = |wrong: &dyn Fn(&(usize, usize)) -> bool| {
            names(cluster.topics.iter().filter(|(_, topic)| wrong(topic)).map(|(name, _)| name.as_str()))
        };
        if let Some(topics) = named(&|(_, replicas)| *replicas < replication.min(cluster.brokers)) {
            wrong.push(format!(
                "less than {replication} brokers store {topics}: add replicas, or lower bus.replication"
            ));
        }
        if let Some(topics) = named(&|(found, _)| *found < partitions) {
            wrong.push(format!(
                "less than {partitions} partitions has {topics}: add partitions, or lower bus.partitions"
            ));
        }
        wrong
    }

    /// Topics that refuse messages of the maximum size.
    async fn small_topics(&self, cluster: &Cluster) -> Result<Option<String>, StoreError> {
        let needed = self.0.options.max_message();
        let topics: Vec<_> = cluster.topics.keys().map(|topic| ResourceSpecifier::Topic(topic)).collect();
        if topics.is_empty() {
            return Ok(None);
        }
        let options = AdminOptions::new().request_timeout(Some(TIMEOUT));
        let described = self.0.topics.admin().describe_configs(&topics, &options).await;
        let mut small = Vec::new();
        for (topic, config) in cluster.topics.keys().zip(described.map_err(|error| failed(CHECKING, error))?) {
            let config = config.map_err(|error| failed(CHECKING, KafkaError::AdminOp(error)))?;
            let size = config.get("max.message.bytes").and_then(|entry| entry.value.as_ref()?.parse::<usize>().ok());
            if size.is_some_and(|size| needed.parse().is_ok_and(|needed: usize| size < needed)) {
                small.push(topic.as_str());
            }
        }
        Ok(names(small.into_iter()).map(|topics| {
            format!("the largest events do not fit into {topics}: set max.message.bytes of the topic to {needed}")
        }))
    }
}

/// Why no broker answers, as a new client reports it.
fn reason(options: &KafkaOptions) -> Option<String> {
    let config = options.consumer_config("check");
    let client: BaseConsumer<LoggingContext> = config.create_with_context(LoggingContext::default()).ok()?;
    let deadline = Instant::now() + REASON_TIMEOUT;
    // It fails as before. Only a poll tells why.
    let _ = client.fetch_metadata(None, REASON_TIMEOUT / 2);
    while client.context().last_error().is_none() && Instant::now() < deadline {
        let _ = client.poll(POLL);
    }
    client.context().last_error()
}

/// The first names of a list, and how many more there are; `None` for an empty list.
fn names<'a>(topics: impl Iterator<Item = &'a str>) -> Option<String> {
    let topics: Vec<&str> = topics.collect();
    let named = topics.iter().take(MAX_NAMED).copied().collect::<Vec<_>>().join(", ");
    match topics.len().saturating_sub(MAX_NAMED) {
        _ if topics.is_empty() => None,
        0 => Some(named),
        more => Some(format!("{named} and {more} more topics")),
    }
}
