use std::sync::Arc;

use posthaste_api::Domain;

/// The names of the bus's topics.
#[derive(Clone, Debug)]
pub(crate) struct TopicNames {
    prefix: Arc<str>,
}

impl TopicNames {
    pub(crate) fn new(prefix: &str) -> Self {
        Self { prefix: prefix.into() }
    }

    pub(crate) fn events(&self, event_type: &str) -> Arc<str> {
        format!("{}.events.{event_type}", self.prefix).into()
    }

    /// The prefix of the names of all event topics.
    pub(crate) fn all_events(&self) -> String {
        format!("{}.events.", self.prefix)
    }

    pub(crate) fn outbox(&self, domain: Domain) -> Arc<str> {
        format!("{}.outbox.{domain}", self.prefix).into()
    }

    pub(crate) fn dlt(&self, domain: Domain) -> Arc<str> {
        format!("{}.dlt.{domain}", self.prefix).into()
    }

    /// True for an event topic.
    pub(crate) fn has_events(&self, topic: &str) -> bool {
        topic.starts_with(&self.all_events())
    }

    /// True for an outbox topic or a dead-letter topic.
    pub(crate) fn has_deliveries(&self, topic: &str) -> bool {
        Domain::ALL.into_iter().any(|domain| *topic == *self.outbox(domain) || *topic == *self.dlt(domain))
    }
}
