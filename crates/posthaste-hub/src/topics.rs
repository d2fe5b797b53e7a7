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
}
