//! The settings of the hub's services. Each key is declared only here: its name and type as a field, its default and
//! its limits beside it. The configuration file has one section per struct. Its commented default text documents the
//! keys, and a test compares the two.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use posthaste_api::{Domain, duration_text};
use posthaste_schema::compatibility::{Level, UnknownLevel};
use serde::{Deserialize, Serialize};

use crate::topics::TopicNames;

/// How the hub's services run. The defaults are those of the default configuration.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    pub bus: BusSettings,
    pub outbox: OutboxSettings,
    pub routing: RoutingSettings,
    pub delivery: DeliverySettings,
    pub dlt: DltSettings,
    pub retention: RetentionSettings,
    pub channels: Vec<ChannelSettings>,
}

impl Settings {
    /// The compatibility that is set for the schemas of topics.
    pub(crate) fn compatibility_of_topics(&self, topics: &TopicNames) -> HashMap<Arc<str>, Level> {
        let with_level = self.channels.iter().filter_map(|channel| Some((channel, channel.compatibility?)));
        with_level.map(|(channel, level)| (topics.events(&channel.event_type), level.0)).collect()
    }
}

/// A key whose value cannot be used, and why.
pub type Violation = (&'static str, String);

const MILLISECOND: Duration = Duration::from_millis(1);
const TIMEOUTS: RangeInclusive<Duration> = MILLISECOND..=Duration::from_secs(60);
const SIZES: RangeInclusive<usize> = 1..=10_000;
const MAX_RETRY: u32 = 100;
const PARTITIONS: RangeInclusive<u32> = 1..=1_000;
const REPLICATION: RangeInclusive<u32> = 1..=100;

/// The event bus.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BusSettings {
    pub url: String,
    pub topic_prefix: String,
    /// How many channels may be made for event types.
    pub max_channels: usize,
    /// The partitions of a new topic on Kafka.
    pub partitions: u32,
    /// On how many brokers Kafka stores a new topic.
    pub replication: u32,
    pub acks: Acks,
    pub compression: Compression,
    /// How long a new topic on Kafka keeps its records, done or not.
    #[serde(with = "duration_or_off")]
    pub retention: Option<Duration>,
    /// Settings of the Kafka client.
    pub kafka: ClientSettings,
}

/// Which replicas must have a record before its publish is acked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Acks {
    #[default]
    #[serde(rename = "all")]
    All,
    #[serde(rename = "1")]
    One,
    #[serde(rename = "0")]
    None,
}

/// How published records are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    None,
    Gzip,
    Snappy,
    #[default]
    Lz4,
    Zstd,
}

impl Default for BusSettings {
    fn default() -> Self {
        Self {
            url: "builtin".to_owned(),
            topic_prefix: "posthaste".to_owned(),
            max_channels: 1_000,
            partitions: 6,
            replication: 3,
            acks: Acks::default(),
            compression: Compression::default(),
            retention: Some(Duration::from_secs(7 * 24 * 60 * 60)),
            kafka: ClientSettings::default(),
        }
    }
}

impl BusSettings {
    pub fn violations(&self) -> Vec<Violation> {
        let is_topic = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
        let bad_prefix = !(1..=100).contains(&self.topic_prefix.len()) || !is_topic(&self.topic_prefix);
        refused([
            ("bus.topic_prefix", bad_prefix, "is not 1 to 100 characters of A-Z a-z 0-9 . _ -"),
            ("bus.max_channels", self.max_channels == 0, "is 0: at least one event type needs a topic"),
            ("bus.partitions", !PARTITIONS.contains(&self.partitions), "is not 1 to 1000"),
            ("bus.replication", !REPLICATION.contains(&self.replication), "is not 1 to 100"),
        ])
    }
}

/// Settings of a client library, by the names in its documentation.
///
/// `security.protocol = "SASL_SSL"` and `"security.protocol" = "SASL_SSL"` are the same in a configuration file. The name
/// of an environment variable has underscores for the dots.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "BTreeMap<String, ClientSetting>")]
pub struct ClientSettings(pub BTreeMap<String, String>);

/// The values may be secrets.
impl fmt::Debug for ClientSettings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_set().entries(self.0.keys()).finish()
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ClientSetting {
    Flag(bool),
    Number(i64),
    Fraction(f64),
    Text(String),
    Inside(BTreeMap<String, ClientSetting>),
}

impl From<BTreeMap<String, ClientSetting>> for ClientSettings {
    fn from(settings: BTreeMap<String, ClientSetting>) -> Self {
        let mut flat = BTreeMap::new();
        flatten(settings, "", &mut flat);
        Self(flat)
    }
}

fn flatten(settings: BTreeMap<String, ClientSetting>, inside: &str, flat: &mut BTreeMap<String, String>) {
    for (name, setting) in settings {
        let name = format!("{inside}{}", name.replace('_', "."));
        let value = match setting {
            ClientSetting::Flag(value) => value.to_string(),
            ClientSetting::Number(value) => value.to_string(),
            ClientSetting::Fraction(value) => value.to_string(),
            ClientSetting::Text(value) => value,
            ClientSetting::Inside(settings) => {
                flatten(settings, &format!("{name}."), flat);
                continue;
            }
        };
        flat.insert(name, value);
    }
}

/// How rows of the outbox table are published to the bus.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OutboxSettings {
    #[serde(with = "duration_text")]
    pub poll_interval: Duration,
    pub batch_size: usize,
    pub max_attempts: u32,
    #[serde(with = "duration_text")]
    pub backoff_base: Duration,
    #[serde(with = "duration_text")]
    pub backoff_max: Duration,
    #[serde(with = "duration_text")]
    pub lease: Duration,
    #[serde(with = "duration_text")]
    pub drain: Duration,
}

impl Default for OutboxSettings {
    fn default() -> Self {
        Self {
            poll_interval: Duration::from_millis(500),
            batch_size: 500,
            max_attempts: 10,
            backoff_base: Duration::from_millis(200),
            backoff_max: Duration::from_secs(60),
            lease: Duration::from_secs(30),
            drain: Duration::from_secs(5),
        }
    }
}

impl OutboxSettings {
    pub fn violations(&self) -> Vec<Violation> {
        let short_lease = self.lease < Duration::from_millis(100);
        refused([
            ("outbox.poll_interval", self.poll_interval < MILLISECOND, "is shorter than 1ms"),
            ("outbox.batch_size", !SIZES.contains(&self.batch_size), "is not 1 to 10000"),
            ("outbox.max_attempts", self.max_attempts == 0, "is 0: an event needs at least one attempt"),
            ("outbox.backoff_base", self.backoff_base < MILLISECOND, "is shorter than 1ms"),
            ("outbox.backoff_max", self.backoff_max < self.backoff_base, "is shorter than outbox.backoff_base"),
            ("outbox.lease", short_lease, "is shorter than 100ms: it would run out before it could be renewed"),
        ])
    }
}

/// The rules that select the domain of an event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RoutingSettings {
    pub default_domain: Domain,
    pub rules: Vec<RoutingRule>,
}

impl Default for RoutingSettings {
    fn default() -> Self {
        Self { default_domain: Domain::Organization, rules: Vec::new() }
    }
}

/// Patterns with `*` for any run of characters; an absent one matches everything. The first rule that matches wins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoutingRule {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event_type: Option<String>,
    pub domain: Domain,
}

/// How fresh events are delivered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeliverySettings {
    #[serde(with = "duration_text")]
    pub timeout: Duration,
    pub max_retry: u32,
    /// The maximum number of concurrent requests to one subscription.
    pub concurrency: usize,
}

impl Default for DeliverySettings {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(1), max_retry: 3, concurrency: 64 }
    }
}

impl DeliverySettings {
    pub fn violations(&self) -> Vec<Violation> {
        refused([
            ("delivery.timeout", !TIMEOUTS.contains(&self.timeout), "is not 1ms to 60s"),
            ("delivery.max_retry", self.max_retry > MAX_RETRY, "is more than 100"),
            ("delivery.concurrency", !SIZES.contains(&self.concurrency), "is not 1 to 10000"),
        ])
    }
}

/// How dead letters are delivered again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DltSettings {
    #[serde(with = "duration_text")]
    pub timeout: Duration,
    #[serde(with = "duration_text")]
    pub retry_interval: Duration,
    /// The number of scheduled retries of a dead letter; 0 for none.
    pub max_retry: u32,
    pub batch_size: usize,
}

impl Default for DltSettings {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(5), retry_interval: Duration::from_secs(3), max_retry: 3, batch_size: 100 }
    }
}

impl DltSettings {
    pub fn violations(&self) -> Vec<Violation> {
        refused([
            ("dlt.timeout", !TIMEOUTS.contains(&self.timeout), "is not 1ms to 60s"),
            ("dlt.retry_interval", self.retry_interval < MILLISECOND, "is shorter than 1ms"),
            ("dlt.max_retry", self.max_retry > MAX_RETRY, "is more than 100"),
            ("dlt.batch_size", !SIZES.contains(&self.batch_size), "is not 1 to 10000"),
        ])
    }
}

/// What differs for one event type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChannelSettings {
    pub event_type: String,
    /// How a new version of the schema must relate to the versions before it. Absent: as the registry says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compatibility: Option<Compatibility>,
}

/// The compatibility of a schema, by its name in the API of a Schema Registry.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Compatibility(pub Level);

impl TryFrom<String> for Compatibility {
    type Error = UnknownLevel;

    fn try_from(text: String) -> Result<Self, UnknownLevel> {
        text.parse().map(Self)
    }
}

impl From<Compatibility> for String {
    fn from(Compatibility(level): Compatibility) -> Self {
        level.as_str().to_owned()
    }
}

/// How long data is kept that is not needed any more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetentionSettings {
    /// The records of the built-in bus that every group has done.
    #[serde(with = "duration_or_off")]
    pub log: Option<Duration>,
}

impl Default for RetentionSettings {
    fn default() -> Self {
        Self { log: Some(Duration::from_secs(24 * 60 * 60)) }
    }
}

/// A duration, or `"off"` to keep for ever.
mod duration_or_off {
    use std::time::Duration;

    use posthaste_api::{format_duration, parse_duration};
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    const OFF: &str = "off";

    pub fn serialize<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        match duration {
            Some(duration) => serializer.serialize_str(&format_duration(*duration)),
            None => serializer.serialize_str(OFF),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        let text = String::deserialize(deserializer)?;
        match text.as_str() {
            OFF => Ok(None),
            text => match parse_duration(text) {
                Ok(duration) => Ok(Some(duration)),
                Err(error) => Err(D::Error::custom(format!("{text:?} is {error}, or write \"off\""))),
            },
        }
    }
}

fn refused<const N: usize>(checks: [(&'static str, bool, &str); N]) -> Vec<Violation> {
    checks.into_iter().filter(|(_, refused, _)| *refused).map(|(key, _, why)| (key, why.to_owned())).collect()
}
