//! The words of the registry of events and subscriptions, the same on every database.

use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use posthaste_core::StoreError;

/// What identifies a kind of event; `*` in any place stands for anything.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EventKey {
    /// Who publishes it.
    pub source_service: String,
    /// What happened.
    pub event_type: String,
    /// To what kind of thing.
    pub resource_type: String,
    /// By what kind of operation.
    pub operation_type: String,
}

/// What a definition says, without what the registry adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefinitionFields {
    /// Which events it stands for. No two definitions have the same.
    pub key: EventKey,
    /// For people.
    pub description: Option<String>,
}

/// A kind of event that can be subscribed to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Definition {
    /// A UUID.
    pub id: String,
    /// What it says.
    pub fields: DefinitionFields,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
    /// From 1, one more with every change.
    pub version: i64,
}

/// What a subscription says, without what the registry adds.
#[derive(Clone, PartialEq, Eq)]
pub struct SubscriptionFields {
    /// Who subscribes.
    pub subscriber_id: String,
    /// To what.
    pub definition_id: String,
    /// Where events go, without the values of the query string.
    pub endpoint: String,
    /// Of the whole address: the same subscriber, definition, tenant and address are the same subscription.
    pub endpoint_digest: Bytes,
    /// What the body is when the event does not say.
    pub payload_type: String,
    /// The kind of credentials.
    pub auth_type: String,
    /// Credentials, the whole address and the values of headers, encrypted; empty where there are none.
    pub credentials_sealed: Bytes,
    /// Which headers are sent with every event.
    pub header_names: Vec<String>,
    /// How long one request may take, where it differs from the default.
    pub timeout: Option<Duration>,
    /// How many immediate retries, where it differs from the default.
    pub max_retry: Option<u32>,
    /// Only events of this tenant; `None` for all.
    pub tenant_id: Option<String>,
    /// Whether events are matched at all.
    pub active: bool,
}

impl std::fmt::Debug for SubscriptionFields {
    /// Without the sealed credentials, which say nothing to anybody.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SubscriptionFields")
            .field("subscriber_id", &self.subscriber_id)
            .field("definition_id", &self.definition_id)
            .field("endpoint", &self.endpoint)
            .field("auth_type", &self.auth_type)
            .field("tenant_id", &self.tenant_id)
            .field("active", &self.active)
            .finish_non_exhaustive()
    }
}

/// Somebody's wish to receive a kind of event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subscription {
    /// A UUID.
    pub id: String,
    /// What it says.
    pub fields: SubscriptionFields,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
    /// From 1, one more with every change.
    pub version: i64,
}

/// What a request to make something came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Created<T> {
    /// It was made.
    New(T),
    /// It was there before, and stays as it is.
    Existing(T),
}

/// Which subscriptions to list. Every given condition must hold.
#[derive(Clone, Debug, Default)]
pub struct SubscriptionFilter {
    /// Whose.
    pub subscriber_id: Option<String>,
    /// To what.
    pub definition_id: Option<String>,
}

/// Which part of a list.
#[derive(Clone, Debug, Default)]
pub struct PageRequest {
    /// Only what comes behind this id; instead of `page`, which must read all pages before it.
    pub after: Option<String>,
    /// From 0.
    pub page: u32,
    /// How many to a page.
    pub size: u32,
}

/// Part of a list, oldest first.
#[derive(Clone, Debug)]
pub struct Page<T> {
    /// What is on it.
    pub items: Vec<T>,
    /// How many there are in all.
    pub total: u64,
    /// Whether something comes behind it.
    pub has_more: bool,
}

/// Why the registry did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// Another definition has this key.
    #[error("a definition with this key exists already")]
    Duplicate,
    /// There is nothing with this id.
    #[error("there is nothing with this id")]
    NotFound,
    /// Subscriptions refer to the definition.
    #[error("the definition has subscriptions: delete them first")]
    InUse,
    /// It changed since the caller read it.
    #[error("it is at version {found} and not at {expected}: read it again")]
    Stale {
        /// The caller's.
        expected: i64,
        /// The registry's.
        found: i64,
    },
    /// The subscription refers to a definition that is not there.
    #[error("there is no definition with this id")]
    UnknownDefinition,
    /// The database did not do what it was asked.
    #[error(transparent)]
    Store(#[from] StoreError),
}
