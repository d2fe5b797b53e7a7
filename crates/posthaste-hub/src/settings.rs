//! The settings of the hub's services. Each key is declared only here: its name and type as a field, its default and
//! its limits beside it. The configuration file has one section per struct. Its commented default text documents the
//! keys, and a test compares the two.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use posthaste_api::{Domain, SourceMode, duration_text, format_duration};
use posthaste_core::outbox::TableName;
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
    /// What the configuration says about the channel of this type.
    pub(crate) fn channel(&self, event_type: &str) -> Option<&ChannelSettings> {
        self.channels.iter().find(|channel| channel.event_type == event_type)
    }

    pub(crate) fn is_channel_enabled(&self, event_type: &str) -> bool {
        self.channel(event_type).is_none_or(|channel| channel.enabled)
    }

    /// How often an outbox table must be searched for rows of other programs.
    pub(crate) fn shortest_interval(&self) -> Duration {
        let intervals = self.channels.iter().filter_map(|channel| channel.interval);
        intervals.fold(self.outbox.poll_interval, Duration::min)
    }

    /// The names of the topics.
    pub(crate) fn topic_names(&self) -> TopicNames {
        TopicNames::new(&self.bus.topic_prefix).with_own(&self.channels)
    }

    /// The compatibility that is set for the schemas of topics.
    pub(crate) fn compatibility_of_topics(&self, topics: &TopicNames) -> HashMap<Arc<str>, Level> {
        let with_level = self.channels.iter().filter_map(|channel| Some((channel, channel.compatibility?)));
        with_level.map(|(channel, level)| (topics.events(&channel.event_type), level.0)).collect()
    }
}

/// A key whose value cannot be used, and why.
pub type Violation = (&'static str, String);

const MILLISECOND: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
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
    /// The partitions of a new topic, on a bus that several processes read.
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
        let bad_prefix = self.topic_prefix.len() > 100 || !is_topic(&self.topic_prefix);
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
    /// Keeps the order of the events of an aggregate, from the table to their topics.
    pub ordered: bool,
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
            ordered: false,
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
    pub cleanup: CleanupSettings,
}

impl Default for DltSettings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(5),
            retry_interval: Duration::from_secs(3),
            max_retry: 3,
            batch_size: 100,
            cleanup: CleanupSettings::default(),
        }
    }
}

impl DltSettings {
    pub fn violations(&self) -> Vec<Violation> {
        refused([
            ("dlt.timeout", !TIMEOUTS.contains(&self.timeout), "is not 1ms to 60s"),
            ("dlt.retry_interval", self.retry_interval < MILLISECOND, "is shorter than 1ms"),
            ("dlt.max_retry", self.max_retry > MAX_RETRY, "is more than 100"),
            ("dlt.batch_size", !SIZES.contains(&self.batch_size), "is not 1 to 10000"),
            ("dlt.cleanup.interval", self.cleanup.interval < SECOND, "is shorter than 1s"),
        ])
    }
}

/// The removal of dead letters that were delivered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CleanupSettings {
    pub enabled: bool,
    /// How often it runs, and how long a delivered dead letter is kept at least.
    #[serde(with = "duration_text")]
    pub interval: Duration,
}

impl Default for CleanupSettings {
    fn default() -> Self {
        Self { enabled: false, interval: Duration::from_secs(60 * 60) }
    }
}

/// How events are accepted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct IngestSettings {
    /// How long at least a published event is recognised if it is published again.
    #[serde(with = "duration_text")]
    pub dedupe_window: Duration,
}

impl Default for IngestSettings {
    fn default() -> Self {
        Self { dedupe_window: DAY }
    }
}

/// What differs for one event type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChannelSettings {
    pub event_type: String,
    /// The topic. Absent: named after the event type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topic: Option<String>,
    /// How often the outbox is searched for rows of other programs. Absent: `outbox.poll_interval`.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "duration_text::option")]
    pub interval: Option<Duration>,
    /// How many rows are claimed or settled together. Absent: `outbox.batch_size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<usize>,
    /// False: events wait in the outbox.
    #[serde(default = "yes")]
    pub enabled: bool,
    /// How long after the start of the server the first event is published.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "duration_text::option")]
    pub start_delay: Option<Duration>,
    /// Absent: `bus.acks`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acks: Option<Acks>,
    /// A bus elsewhere, to which events are only exported. Absent: `bus.url`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bus_url: Option<String>,
    /// Settings of the Kafka client for `bus_url`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub kafka: ClientSettings,
    /// Absent: `registry.url`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registry_url: Option<String>,
    /// How the server proves to the registry at `registry_url` who it is.
    #[serde(default, skip_serializing_if = "is_default")]
    pub registry_auth: RegistryAuth,
    /// How a new version of the schema must relate to the versions before it. Absent: as the registry says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compatibility: Option<Compatibility>,
}

fn yes() -> bool {
    true
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A user and a password, or a bearer token. A value may name a file.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RegistryAuth {
    pub username: String,
    pub password: String,
    pub token: String,
}

/// All values may be secrets.
impl fmt::Debug for RegistryAuth {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RegistryAuth").finish_non_exhaustive()
    }
}

impl ChannelSettings {
    /// True if its events are not published to the bus of the hub, or not in the same way.
    pub fn has_own_bus(&self) -> bool {
        self.acks.is_some() || self.bus_url.is_some() || self.registry_url.is_some()
    }

    /// What is wrong with the channels.
    pub fn violations(channels: &[Self], bus: &BusSettings) -> Vec<Violation> {
        let (mut found, mut types, mut topics) = (Vec::new(), HashMap::new(), HashMap::new());
        let names = TopicNames::new(&bus.topic_prefix);
        for channel in channels {
            let event_type = &channel.event_type;
            let mut refuse = |is_refused: bool, why: &str| {
                if is_refused {
                    found.push(("channels", format!("has a channel {event_type:?} that {why}")));
                }
            };
            refuse(!posthaste_api::is_event_type(event_type), "is not 1 to 128 characters of A-Z a-z 0-9 . _ -");
            refuse(types.insert(event_type, ()).is_some(), "is there twice: write one entry for each event type");
            refuse(channel.interval.is_some_and(|interval| interval < MILLISECOND), "has an interval shorter than 1ms");
            refuse(
                channel.batch_size.is_some_and(|size| !SIZES.contains(&size)),
                "has a batch_size that is not 1 to 10000",
            );
            let is_kafka = channel.bus_url.is_some() || bus.url.starts_with("kafka://");
            refuse(channel.acks.is_some() && !is_kafka, "has acks, which only Kafka knows: remove them, or use Kafka");
            refuse(
                channel.bus_url.is_none() && !is_default(&channel.kafka),
                "has settings of Kafka and no bus_url: write them into [bus.kafka]",
            );
            refuse(
                channel.registry_url.is_none() && !is_default(&channel.registry_auth),
                "has a registry_auth and no registry_url: write it into [registry]",
            );
            if let Some(topic) = &channel.topic {
                refuse(!is_topic(topic), "has a topic that is not 1 to 249 characters of A-Z a-z 0-9 . _ -");
                let is_reserved = topic.starts_with(&format!("{}.", bus.topic_prefix));
                refuse(
                    is_reserved && **topic != *names.events(event_type),
                    "has a topic whose name begins with bus.topic_prefix, which is for topics that the server names itself",
                );
                refuse(topics.insert(topic, ()).is_some(), "has the topic of another channel: each type needs its own");
            }
        }
        found
    }
}

/// True for a name that Kafka accepts.
fn is_topic(name: &str) -> bool {
    (1..=249).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// An outbox table in the database of a service.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceSettings {
    pub name: String,
    pub url: String,
    #[serde(default)]
    pub table: TableName,
    #[serde(default)]
    pub mode: SourceMode,
    /// How often the table is searched. Absent: `outbox.poll_interval`.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "duration_text::option")]
    pub poll_interval: Option<Duration>,
    /// How many rows are claimed or settled together. Absent: `outbox.batch_size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<usize>,
    /// False: the table is not read.
    #[serde(default = "yes")]
    pub enabled: bool,
}

/// The URL may contain a password.
impl fmt::Debug for SourceSettings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("SourceSettings").field("name", &self.name).finish_non_exhaustive()
    }
}

impl SourceSettings {
    /// What is wrong with the sources, apart from their URLs.
    pub fn violations(sources: &[Self]) -> Vec<Violation> {
        let (mut found, mut names) = (Vec::new(), HashMap::new());
        for source in sources {
            let name = &source.name;
            let mut refuse = |is_refused: bool, why: &str| {
                if is_refused {
                    found.push(("sources", format!("has a source {name:?} that {why}")));
                }
            };
            let is_name = (1..=64).contains(&name.len())
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
            refuse(!is_name, "has a name that is not 1 to 64 characters of A-Z a-z 0-9 . _ -");
            refuse(names.insert(name, ()).is_some(), "is there twice: give each its own name");
            refuse(
                source.poll_interval.is_some_and(|interval| interval < MILLISECOND),
                "has a poll_interval shorter than 1ms",
            );
            refuse(
                source.batch_size.is_some_and(|size| !SIZES.contains(&size)),
                "has a batch_size that is not 1 to 10000",
            );
        }
        found
    }
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
    /// The rows of the outbox table that were published.
    #[serde(with = "duration_or_off")]
    pub outbox: Option<Duration>,
    /// The records of the built-in bus that every group has done.
    #[serde(with = "duration_or_off")]
    pub log: Option<Duration>,
    /// Quarantined records, whatever their status.
    #[serde(with = "duration_or_off")]
    pub quarantine: Option<Duration>,
}

impl Default for RetentionSettings {
    fn default() -> Self {
        Self { outbox: Some(7 * DAY), log: Some(DAY), quarantine: Some(30 * DAY) }
    }
}

impl RetentionSettings {
    pub fn violations(&self, ingest: &IngestSettings) -> Vec<Violation> {
        let window = ingest.dedupe_window;
        let too_short = format!(
            "is shorter than ingest.dedupe_window, {}: an event that is published again within that time would be \
             taken for a new one. Give a longer time or \"off\", or set a shorter ingest.dedupe_window",
            format_duration(window)
        );
        refused([
            ("retention.outbox", self.outbox.is_some_and(|kept| kept < window), &too_short),
            ("retention.quarantine", self.quarantine.is_some_and(|kept| kept < SECOND), "is shorter than 1s"),
        ])
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
