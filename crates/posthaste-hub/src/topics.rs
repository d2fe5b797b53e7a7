use std::collections::HashMap;
use std::sync::Arc;

use posthaste_api::Domain;
use posthaste_core::bus::Topics;

use crate::settings::ChannelSettings;

/// The names of the bus's topics.
#[derive(Clone, Debug)]
pub(crate) struct TopicNames {
    prefix: Arc<str>,
    /// The event topics that the configuration names, by event type.
    own: Arc<HashMap<String, Arc<str>>>,
    /// Those of them that are on the bus of the hub.
    read: Arc<Vec<String>>,
}

impl TopicNames {
    pub(crate) fn new(prefix: &str) -> Self {
        Self { prefix: prefix.into(), own: Arc::default(), read: Arc::default() }
    }

    /// With the topics that the configuration names.
    pub(crate) fn with_own(self, channels: &[ChannelSettings]) -> Self {
        let named = || channels.iter().filter_map(|channel| Some((channel, channel.topic.as_deref()?)));
        let own = named().map(|(channel, topic)| (channel.event_type.clone(), topic.into())).collect();
        let on_bus = named().filter(|(channel, _)| channel.bus_url.is_none());
        let read = on_bus.map(|(_, topic)| topic.to_owned()).collect();
        Self { own: Arc::new(own), read: Arc::new(read), ..self }
    }

    pub(crate) fn events(&self, event_type: &str) -> Arc<str> {
        match self.own.get(event_type) {
            Some(topic) => topic.clone(),
            None => format!("{}{event_type}", self.events_prefix()).into(),
        }
    }

    /// All event topics.
    pub(crate) fn all_events(&self) -> Topics {
        match self.read.is_empty() {
            true => Topics::Prefix(self.events_prefix()),
            false => Topics::PrefixAndNamed(self.events_prefix(), self.read.to_vec()),
        }
    }

    fn events_prefix(&self) -> String {
        format!("{}.events.", self.prefix)
    }

    pub(crate) fn outbox(&self, domain: Domain) -> Arc<str> {
        format!("{}.outbox.{domain}", self.prefix).into()
    }

    pub(crate) fn dlt(&self, domain: Domain) -> Arc<str> {
        format!("{}.dlt.{domain}", self.prefix).into()
    }

    /// The name of a group, without the prefix that it has on Kafka.
    pub(crate) fn without_prefix<'a>(&self, group: &'a str) -> &'a str {
        group.strip_prefix(&*self.prefix).and_then(|rest| rest.strip_prefix('.')).unwrap_or(group)
    }

    /// True for an event topic.
    pub(crate) fn has_events(&self, topic: &str) -> bool {
        topic.starts_with(&self.events_prefix()) || self.own.values().any(|own| **own == *topic)
    }

    /// True for an outbox topic or a dead-letter topic.
    pub(crate) fn has_deliveries(&self, topic: &str) -> bool {
        Domain::ALL.into_iter().any(|domain| *topic == *self.outbox(domain) || *topic == *self.dlt(domain))
    }
}
