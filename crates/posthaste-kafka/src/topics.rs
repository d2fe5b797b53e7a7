use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthaste_core::bus::PublishError;
use posthaste_core::lock;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};

use crate::context::LoggingContext;
use crate::errors::{publish_error, unavailable};
use crate::options::KafkaOptions;

/// How long the cluster may take to create topics, and to describe them.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long a publish waits for the leaders of the partitions of a topic that it uses for the first time.
const READY_TIMEOUT: Duration = Duration::from_secs(2);
/// A new topic is known to all brokers after a moment.
const ASK_AGAIN: Duration = Duration::from_millis(20);

/// Creates topics at their first use, and knows how many partitions each has.
pub(crate) struct TopicCreator {
    admin: Arc<AdminClient<LoggingContext>>,
    options: KafkaOptions,
    known: Mutex<HashMap<Arc<str>, u32>>,
}

impl TopicCreator {
    pub(crate) fn new(options: &KafkaOptions) -> KafkaResult<Self> {
        let admin = options.admin_config().create_with_context(LoggingContext::default())?;
        Ok(Self { admin: Arc::new(admin), options: options.clone(), known: Mutex::default() })
    }

    pub(crate) fn admin(&self) -> Arc<AdminClient<LoggingContext>> {
        Arc::clone(&self.admin)
    }

    /// The number of partitions of each topic. Topics that do not exist are created.
    pub(crate) async fn partitions_of(
        &self,
        topics: BTreeSet<Arc<str>>,
    ) -> HashMap<Arc<str>, Result<u32, PublishError>> {
        let mut found = HashMap::new();
        let mut missing = Vec::new();
        {
            let known = lock(&self.known);
            for topic in topics {
                match known.get(&topic) {
                    Some(partitions) => _ = found.insert(topic, Ok(*partitions)),
                    None => missing.push(topic),
                }
            }
        }
        if !missing.is_empty() {
            found.extend(self.create(missing).await);
        }
        found
    }

    /// The topic was deleted: it is created again at its next use.
    pub(crate) fn forget(&self, topic: &str) {
        lock(&self.known).remove(topic);
    }

    async fn create(&self, topics: Vec<Arc<str>>) -> Vec<(Arc<str>, Result<u32, PublishError>)> {
        let max_message = self.options.max_message();
        let retention = self.options.retention.map_or("-1".to_owned(), |retention| retention.as_millis().to_string());
        let new: Vec<NewTopic<'_>> =
            topics.iter().map(|topic| self.new_topic(topic, &max_message, &retention)).collect();
        let options = AdminOptions::new().request_timeout(Some(TIMEOUT)).operation_timeout(Some(TIMEOUT));
        let mut refused: HashMap<String, RDKafkaErrorCode> = HashMap::new();
        match self.admin.create_topics(&new, &options).await {
            Ok(results) => refused.extend(results.into_iter().filter_map(Result::err)),
            Err(error) => {
                return topics.into_iter().map(|topic| (topic, Err(publish_error(&error)))).collect();
            }
        }
        let mut results = Vec::with_capacity(topics.len());
        for topic in topics {
            let result = match refused.get(&*topic) {
                None | Some(RDKafkaErrorCode::TopicAlreadyExists) => self.describe(&topic).await,
                // Someone else may create topics here. The cluster refuses before it looks whether the topic exists.
                Some(RDKafkaErrorCode::TopicAuthorizationFailed | RDKafkaErrorCode::ClusterAuthorizationFailed) => {
                    self.describe(&topic).await
                }
                Some(code) => Err(publish_error(&KafkaError::AdminOp(*code))),
            };
            if let Ok(partitions) = &result {
                lock(&self.known).insert(Arc::clone(&topic), *partitions);
            }
            results.push((topic, result));
        }
        results
    }

    fn new_topic<'a>(&self, topic: &'a str, max_message: &'a str, retention: &'a str) -> NewTopic<'a> {
        let replication = TopicReplication::Fixed(i32::try_from(self.options.replication).unwrap_or(i32::MAX));
        let partitions = i32::try_from(self.options.partitions).unwrap_or(i32::MAX);
        let new = NewTopic::new(topic, partitions, replication).set("max.message.bytes", max_message);
        new.set("retention.ms", retention)
    }

    /// Asks how many partitions a topic has, until the cluster knows it and the leaders of its partitions are ready.
    ///
    /// A leader is ready when it answers for its partition. A new leader may refuse a first request and accept the next
    /// one: the client then takes the first one for stored when it repeats it (see `unknown_offset` of the producer).
    async fn describe(&self, topic: &Arc<str>) -> Result<u32, PublishError> {
        let start = tokio::time::Instant::now();
        loop {
            let (admin, name) = (Arc::clone(&self.admin), Arc::clone(topic));
            // Blocking calls of the client library.
            let asked = tokio::task::spawn_blocking(move || look_up(&admin, &name));
            let found = asked.await.map_err(unavailable)?.map_err(|error| publish_error(&error))?;
            match found {
                // A partition that stays without a leader does not stop the others.
                Some(found) if found.is_ready || start.elapsed() > READY_TIMEOUT => return Ok(found.partitions),
                None if start.elapsed() > TIMEOUT => {
                    return Err(publish_error(&KafkaError::AdminOp(RDKafkaErrorCode::UnknownTopicOrPartition)));
                }
                Some(_) | None => tokio::time::sleep(ASK_AGAIN).await,
            }
        }
    }
}

struct FoundTopic {
    partitions: u32,
    /// The leaders of all partitions answer.
    is_ready: bool,
}

fn look_up(admin: &AdminClient<LoggingContext>, topic: &str) -> KafkaResult<Option<FoundTopic>> {
    let metadata = admin.inner().fetch_metadata(Some(topic), TIMEOUT)?;
    let found = metadata.topics().iter().find(|found| found.name() == topic && !found.partitions().is_empty());
    Ok(found.map(|found| FoundTopic {
        partitions: u32::try_from(found.partitions().len()).unwrap_or(u32::MAX),
        is_ready: found.partitions().iter().all(|partition| {
            partition.leader() >= 0 && admin.inner().fetch_watermarks(topic, partition.id(), READY_TIMEOUT).is_ok()
        }),
    }))
}
