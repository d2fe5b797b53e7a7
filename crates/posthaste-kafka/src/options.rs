use std::collections::BTreeMap;
use std::time::Duration;

use posthaste_core::bus::MAX_RECORD;
use rdkafka::ClientConfig;

/// Settings that the bus relies on. They cannot be passed through.
const OWN_SETTINGS: [&str; 8] = [
    "auto.offset.reset",
    "bootstrap.servers",
    "enable.auto.commit",
    "enable.auto.offset.store",
    "enable.idempotence",
    "group.id",
    "message.max.bytes",
    "partition.assignment.strategy",
];
/// A consumer that the cluster has not heard of for this long loses its partitions, unless `session.timeout.ms` is passed
/// through.
const SESSION_TIMEOUT: Duration = Duration::from_secs(10);
/// Room for what the protocol adds to a record.
const RECORD_OVERHEAD: usize = 64 * 1024;

/// How a Kafka cluster is used.
#[derive(Clone, Debug)]
pub struct KafkaOptions {
    /// The brokers to contact first, as host:port.
    pub brokers: Vec<String>,
    /// The names of our topics and the ids of our groups begin with this and a dot.
    pub topic_prefix: String,
    /// Our topics whose names do not begin with that.
    pub other_topics: Vec<String>,
    /// The partitions of a new topic; existing topics keep theirs.
    pub partitions: u32,
    /// On how many brokers a new topic is stored.
    pub replication: u32,
    /// How long a new topic keeps its records, done or not; `None`: for ever.
    pub retention: Option<Duration>,
    /// Which replicas must have a record before its publish is acked: all, 1 or 0.
    pub acks: String,
    /// The compression of published records: none, gzip, snappy, lz4 or zstd.
    pub compression: String,
    /// A consumer that is not used for this long leaves its group.
    pub lease: Duration,
    /// More settings of the client library, by the names in its documentation.
    pub client: BTreeMap<String, String>,
}

/// A setting of the client library that cannot be passed through.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} is set by posthaste itself: remove it")]
pub struct OptionsError {
    /// The name of the setting.
    pub name: String,
}

impl Default for KafkaOptions {
    fn default() -> Self {
        Self {
            brokers: vec!["127.0.0.1:9092".to_owned()],
            topic_prefix: "posthaste".to_owned(),
            other_topics: Vec::new(),
            partitions: 6,
            replication: 3,
            retention: Some(Duration::from_secs(7 * 24 * 60 * 60)),
            acks: "all".to_owned(),
            compression: "lz4".to_owned(),
            lease: Duration::from_secs(30),
            client: BTreeMap::new(),
        }
    }
}

impl KafkaOptions {
    /// Refuses settings of the client library that the bus sets itself.
    pub fn validate(&self) -> Result<(), OptionsError> {
        let own = self.client.keys().find(|name| OWN_SETTINGS.contains(&name.as_str()));
        own.map_or(Ok(()), |name| Err(OptionsError { name: name.clone() }))
    }

    /// True if the topic is ours.
    pub(crate) fn is_ours(&self, topic: &str) -> bool {
        let has_prefix = topic.strip_prefix(&self.topic_prefix).is_some_and(|rest| rest.starts_with('.'));
        has_prefix || self.other_topics.iter().any(|other| other == topic)
    }

    /// The id of a group in the cluster, which other installations share.
    pub(crate) fn group_id(&self, group: &str) -> String {
        format!("{}.{group}", self.topic_prefix)
    }

    /// How long a consumer certainly keeps its partitions after the cluster has heard of it.
    pub(crate) fn lease(&self) -> Duration {
        self.lease.min(self.session_timeout())
    }

    /// A consumer that the cluster has not heard of for this long loses its partitions.
    pub(crate) fn session_timeout(&self) -> Duration {
        let passed_through = self.client.get("session.timeout.ms").and_then(|millis| millis.parse().ok());
        passed_through.map_or(SESSION_TIMEOUT, Duration::from_millis)
    }

    /// The largest message, with what the protocol adds to a record.
    pub(crate) fn max_message(&self) -> String {
        (MAX_RECORD + RECORD_OVERHEAD).to_string()
    }

    /// Adds what every client needs, and the settings that are passed through.
    fn add_client_settings(&self, config: &mut ClientConfig) {
        config.set("client.id", "posthaste").set("socket.keepalive.enable", "true");
        config.set("reconnect.backoff.max.ms", "2000");
        for (name, value) in &self.client {
            config.set(name, value);
        }
        config.set("bootstrap.servers", self.brokers.join(","));
        config.set("message.max.bytes", self.max_message());
    }

    pub(crate) fn admin_config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        self.add_client_settings(&mut config);
        config
    }

    pub(crate) fn producer_config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("linger.ms", "2").set("batch.size", "1000000").set("compression.type", &self.compression);
        config.set("queue.buffering.max.messages", "100000").set("queue.buffering.max.kbytes", "131072");
        // A publish gets its answer before the lease of the rows that it publishes ends.
        config.set("delivery.timeout.ms", "20000").set("request.timeout.ms", "10000");
        self.add_client_settings(&mut config);
        let is_idempotent = self.acks == "all" || self.acks == "-1";
        config.set("acks", &self.acks).set("enable.idempotence", is_idempotent.to_string());
        config
    }

    /// A producer that sends each record in a request of its own. It repeats what was refused in a batch, so it has less
    /// time.
    pub(crate) fn single_producer_config(&self) -> ClientConfig {
        let mut config = self.producer_config();
        config.set("batch.num.messages", "1").set("linger.ms", "0");
        config.set("delivery.timeout.ms", "8000").set("request.timeout.ms", "4000");
        config
    }

    pub(crate) fn consumer_config(&self, group: &str) -> ClientConfig {
        let mut config = ClientConfig::new();
        // The client reads ahead: at least this many records of a partition, at most so many kilobytes of all. It looks
        // for room again after this many milliseconds.
        config.set("queued.min.messages", "10000").set("queued.max.messages.kbytes", "16384");
        config.set("fetch.queue.backoff.ms", "5");
        config.set("socket.timeout.ms", "10000").set("fetch.wait.max.ms", "100").set("fetch.error.backoff.ms", "100");
        config.set("topic.metadata.refresh.interval.ms", "2000").set("topic.metadata.propagation.max.ms", "5000");
        let session_timeout = self.session_timeout();
        let heartbeat = (session_timeout / 5).clamp(Duration::from_millis(50), Duration::from_secs(3));
        config.set("session.timeout.ms", session_timeout.as_millis().to_string());
        config.set("heartbeat.interval.ms", heartbeat.as_millis().to_string());
        self.add_client_settings(&mut config);
        config.set("group.id", self.group_id(group)).set("partition.assignment.strategy", "cooperative-sticky");
        config.set("enable.auto.commit", "false").set("enable.auto.offset.store", "false");
        config.set("enable.partition.eof", "false").set("allow.auto.create.topics", "false");
        // The position is always known when a partition is assigned. If it is lost later, that is an error.
        config.set("auto.offset.reset", "error");
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_settings_are_passed_through_except_those_of_the_bus() {
        let client = [("linger.ms", "7"), ("security.protocol", "sasl_ssl"), ("sasl.password", "secret")];
        let client = client.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let options = KafkaOptions { client, ..KafkaOptions::default() };
        assert_eq!(options.validate(), Ok(()));
        assert_eq!(options.producer_config().get("linger.ms"), Some("7"));
        for config in [options.consumer_config("g"), options.producer_config(), options.admin_config()] {
            assert_eq!(config.get("security.protocol"), Some("sasl_ssl"));
            assert_eq!(config.get("sasl.password"), Some("secret"));
        }
        let options = KafkaOptions { client: [("group.id".to_owned(), "x".to_owned())].into(), ..options };
        assert!(options.validate().unwrap_err().to_string().starts_with("group.id"));
    }
}
