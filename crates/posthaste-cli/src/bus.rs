//! The bus of a configuration. Only this module names Kafka.

use std::collections::HashMap;
use std::sync::Arc;

use posthaste_core::bus::Bus;
use posthaste_hub::{ChannelBus, ChannelSettings, ExternalBus};

use crate::config::Config;
use crate::embedded::StartError;
use crate::registry;

/// The address of the bus that is built into the database.
const BUILT_IN: &str = "builtin";
const KAFKA: &str = "kafka://";

/// The reason why a server cannot use this bus address, if there is one.
pub fn refusal(url: &str) -> Option<String> {
    let Some(brokers) = url.strip_prefix(KAFKA) else {
        let why = "is not the address of a bus: write \"builtin\", or kafka://HOST:PORT with more brokers after commas";
        return (url != BUILT_IN).then(|| why.to_owned());
    };
    if !cfg!(feature = "kafka") {
        let why = "names Kafka, and this binary was built without it: use a release package, or build with `--features \
                   kafka`; or write \"builtin\"";
        return Some(why.to_owned());
    }
    let is_broker = |broker: &str| {
        let (host, port) = broker.rsplit_once(':').unwrap_or_default();
        !host.is_empty() && !host.contains(['/', '@', ' ']) && port.parse::<u16>().is_ok_and(|port| port > 0)
    };
    let wrong = brokers.split(',').find(|broker| !is_broker(broker));
    wrong.map(|broker| format!("names the broker {broker:?}: write HOST:PORT, for example kafka://broker:9092"))
}

/// The reason why a channel cannot have this bus of its own, if there is one.
pub fn refusal_of_channel(url: &str) -> Option<String> {
    match url {
        BUILT_IN => Some("is the bus of the database: leave it out, or write kafka://HOST:PORT".to_owned()),
        url => refusal(url),
    }
}

/// The buses of the channels that have their own, by event type. Does not contact them.
pub fn of_channels(config: &Config) -> Result<HashMap<String, ChannelBus>, StartError> {
    let mut buses = HashMap::new();
    for channel in config.channels.iter().filter(|channel| channel.has_own_bus()) {
        let (bus, registry) = (of_channel(config, channel)?, registry::of_channel(channel)?);
        buses.insert(channel.event_type.clone(), ChannelBus { bus, registry });
    }
    Ok(buses)
}

/// The bus of a channel that has its own. A producer has one setting for acks, so a channel with other acks has a producer
/// of its own.
#[cfg(feature = "kafka")]
fn of_channel(config: &Config, channel: &ChannelSettings) -> Result<Option<Arc<dyn Bus>>, StartError> {
    if channel.acks.is_none() && channel.bus_url.is_none() {
        return Ok(None);
    }
    let mut bus = config.bus.clone();
    bus.acks = channel.acks.unwrap_or(bus.acks);
    if let Some(url) = &channel.bus_url {
        (bus.url, bus.kafka) = (url.clone(), channel.kafka.clone());
    }
    let opened = kafka::open(&Config { bus, ..config.clone() })?;
    Ok(opened.map(|bus| Arc::new(bus) as Arc<dyn Bus>))
}

#[cfg(not(feature = "kafka"))]
fn of_channel(_: &Config, _: &ChannelSettings) -> Result<Option<Arc<dyn Bus>>, StartError> {
    Ok(None)
}

/// Opens the bus, if it is not the one that is built into the database. Does not contact it.
#[cfg(feature = "kafka")]
pub fn open(config: &Config) -> Result<Option<ExternalBus>, StartError> {
    let Some(bus) = kafka::open(config)? else { return Ok(None) };
    Ok(Some(ExternalBus { bus: Arc::new(bus.clone()), inspector: Arc::new(bus) }))
}

/// Opens the bus that is built into the database. [`refusal`] refuses any other.
#[cfg(not(feature = "kafka"))]
pub fn open(_: &Config) -> Result<Option<ExternalBus>, StartError> {
    Ok(None)
}

/// Contacts the bus, and says what is wrong with it.
#[cfg(feature = "kafka")]
pub async fn check(config: &Config) -> Result<String, StartError> {
    let Some(bus) = kafka::open(config)? else { return Ok(IN_DATABASE.to_owned()) };
    bus.check().await.map_err(StartError::Bus)
}

/// The bus is built into the database. [`refusal`] refuses any other.
#[cfg(not(feature = "kafka"))]
pub async fn check(_: &Config) -> Result<String, StartError> {
    Ok(IN_DATABASE.to_owned())
}

const IN_DATABASE: &str = "built into the database";

#[cfg(feature = "kafka")]
mod kafka {
    use std::collections::BTreeMap;

    use posthaste_hub::{Acks, Compression};
    use posthaste_kafka::{KafkaBus, KafkaOptions};

    use super::KAFKA;
    use crate::config::Config;
    use crate::embedded::StartError;
    use crate::secret_text;

    pub(super) fn open(config: &Config) -> Result<Option<KafkaBus>, StartError> {
        let Some(brokers) = config.bus.url.strip_prefix(KAFKA) else { return Ok(None) };
        let bus = &config.bus;
        let options = KafkaOptions {
            brokers: brokers.split(',').map(str::to_owned).collect(),
            topic_prefix: bus.topic_prefix.clone(),
            other_topics: config.channels.iter().filter_map(|channel| channel.topic.clone()).collect(),
            partitions: bus.partitions,
            replication: bus.replication,
            acks: match bus.acks {
                Acks::All => "all",
                Acks::One => "1",
                Acks::None => "0",
            }
            .to_owned(),
            compression: match bus.compression {
                Compression::None => "none",
                Compression::Gzip => "gzip",
                Compression::Snappy => "snappy",
                Compression::Lz4 => "lz4",
                Compression::Zstd => "zstd",
            }
            .to_owned(),
            lease: config.outbox.lease,
            retention: bus.retention,
            client: client_settings(&bus.kafka.0)?,
        };
        options.validate().map_err(|error| StartError::BusSetting(format!("bus.kafka: {error}")))?;
        KafkaBus::new(options).map(Some).map_err(|error| StartError::BusSetting(error.chain()))
    }

    fn client_settings(settings: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>, StartError> {
        let resolve = |(name, value): (&String, &String)| {
            let value = secret_text::resolve(&format!("bus.kafka: {name}"), value);
            Ok((name.clone(), value.map_err(StartError::BusSetting)?))
        };
        settings.iter().map(resolve).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_are_not_a_bus_are_refused() {
        assert_eq!(refusal("builtin"), None);
        for wrong in ["", "kafka", "kafka:/x", "nats://host:1"] {
            assert!(refusal(wrong).is_some_and(|why| why.contains("kafka://HOST:PORT")), "{wrong}");
        }
        if cfg!(feature = "kafka") {
            assert_eq!(refusal("kafka://one:9092,two:9092"), None);
            for wrong in ["kafka://", "kafka://one", "kafka://one:9092,", "kafka://one:0", "kafka://user@one:9092"] {
                assert!(refusal(wrong).is_some_and(|why| why.contains("write HOST:PORT")), "{wrong}");
            }
        } else {
            assert!(refusal("kafka://one:9092").is_some_and(|why| why.contains("built without it")));
        }
    }
}
