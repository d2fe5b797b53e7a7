use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, Utc};

use crate::StoreError;
use crate::filter::Filter;

/// Event definitions and subscriptions, with one version number that rises with every change.
///
/// # Laws
///
/// Each is a test of that name in `posthaste-backend-tests` (`hub_laws`).
///
/// - `definitions_are_made_changed_and_removed`: no two definitions have the same key. A definition with subscriptions
///   is not deleted. A change is checked in the transaction that makes it.
/// - `subscriptions_are_made_changed_and_removed`: a subscription always refers to a definition that exists.
/// - `every_change_and_nothing_else_moves_the_version`: in the transaction of the change.
/// - `creating_the_same_subscription_again_returns_the_existing_one`: two subscriptions are the same if they have the
///   same subscriber, definition, tenant, filter and digest of the address.
/// - `a_page_continues_after_an_id`: lists are sorted by id, which is the order of creation.
/// - `sealed_credentials_are_remembered`: also after the subscription that had them is deleted.
///
/// `expected` is the version that the caller read; `None` changes any version. A row that cannot be read MUST be
/// reported and left out of lists, and MUST NOT keep others from being read.
#[async_trait]
pub trait Registry: DefinitionStore + SubscriptionStore + Send + Sync + 'static {
    /// The version, which rises with every change. Until it rises, the result of [`load_active`](Self::load_active) is
    /// current.
    async fn version(&self) -> Result<i64, StoreError>;

    /// Every active subscription with its definition, oldest first, and the version of the registry at that moment.
    async fn load_active(&self) -> Result<(i64, Vec<(Definition, Subscription)>), StoreError>;
}

/// The definitions of a [`Registry`].
#[async_trait]
pub trait DefinitionStore {
    /// Creates a definition; its id is a UUID.
    async fn create_definition(&self, fields: DefinitionFields) -> Result<Definition, RegistryError>;

    /// Replaces the fields of a definition.
    async fn update_definition(
        &self,
        id: &str,
        fields: DefinitionFields,
        expected: Option<i64>,
    ) -> Result<Definition, RegistryError>;

    /// Deletes a definition that no subscription refers to.
    async fn delete_definition(&self, id: &str, expected: Option<i64>) -> Result<(), RegistryError>;

    /// The definition with this id.
    async fn definition(&self, id: &str) -> Result<Option<Definition>, StoreError>;

    /// The definition with exactly this key: `*` matches only `*` here.
    async fn definition_of_key(&self, key: &EventKey) -> Result<Option<Definition>, StoreError>;

    /// One page of all definitions.
    async fn definitions(&self, request: PageRequest) -> Result<Page<Definition>, StoreError>;
}

/// The subscriptions of a [`Registry`].
#[async_trait]
pub trait SubscriptionStore {
    /// Creates a subscription, or returns the same subscription if it exists. The caller chooses the id, because the
    /// credentials are sealed for it.
    async fn create_subscription(
        &self,
        id: &str,
        fields: SubscriptionFields,
    ) -> Result<Created<Subscription>, RegistryError>;

    /// Replaces the fields of a subscription.
    async fn update_subscription(
        &self,
        id: &str,
        fields: SubscriptionFields,
        expected: Option<i64>,
    ) -> Result<Subscription, RegistryError>;

    /// Deletes a subscription.
    async fn delete_subscription(&self, id: &str, expected: Option<i64>) -> Result<(), RegistryError>;

    /// The subscription with this id.
    async fn subscription(&self, id: &str) -> Result<Option<Subscription>, StoreError>;

    /// One page of the subscriptions that meet the filter.
    async fn subscriptions(
        &self,
        filter: &SubscriptionFilter,
        request: PageRequest,
    ) -> Result<Page<Subscription>, StoreError>;

    /// True if credentials were ever sealed in this database.
    async fn has_sealed_credentials(&self) -> Result<bool, StoreError>;
}

/// Identifies a kind of event; `*` in a field matches any value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EventKey {
    /// The service that publishes it.
    pub source_service: String,
    /// The type of the event.
    pub event_type: String,
    /// The kind of resource that it happened to.
    pub resource_type: String,
    /// The kind of operation.
    pub operation_type: String,
}

/// The fields of a definition that a caller gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefinitionFields {
    /// The events that it matches. No two definitions have the same key.
    pub key: EventKey,
    /// A description for people.
    pub description: Option<String>,
}

/// A kind of event that can be subscribed to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Definition {
    /// A UUID.
    pub id: String,
    /// The fields that the caller gave.
    pub fields: DefinitionFields,
    /// When it was created.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
    /// Starts at 1 and rises by 1 with every change.
    pub version: i64,
}

/// The fields of a subscription that a caller gives.
#[derive(Clone, PartialEq, Eq)]
pub struct SubscriptionFields {
    /// The subscriber.
    pub subscriber_id: String,
    /// The definition that it subscribes to.
    pub definition_id: String,
    /// The URL that events are sent to, without the values of the query string.
    pub endpoint: String,
    /// The digest of the whole URL.
    pub endpoint_digest: Bytes,
    /// The type of the body, if the event names none.
    pub payload_type: String,
    /// The kind of credentials.
    pub auth_type: String,
    /// The encrypted credentials, whole URL and values of headers; empty if there are none.
    pub credentials_sealed: Bytes,
    /// The names of the headers that are sent with every event.
    pub header_names: Vec<String>,
    /// How long one request may take; `None` for the default.
    pub timeout: Option<Duration>,
    /// The number of immediate retries; `None` for the default.
    pub max_retry: Option<u32>,
    /// Matches only events of this tenant; `None` for all tenants.
    pub tenant_id: Option<String>,
    /// Matches only events with such a payload.
    pub filter: Filter,
    /// False if the subscription receives no events.
    pub active: bool,
}

impl std::fmt::Debug for SubscriptionFields {
    /// Leaves out the sealed credentials and the digest, which are not readable.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SubscriptionFields")
            .field("subscriber_id", &self.subscriber_id)
            .field("definition_id", &self.definition_id)
            .field("endpoint", &self.endpoint)
            .field("auth_type", &self.auth_type)
            .field("tenant_id", &self.tenant_id)
            .field("filter", &self.filter)
            .field("active", &self.active)
            .finish_non_exhaustive()
    }
}

/// A subscription to a kind of event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subscription {
    /// A UUID.
    pub id: String,
    /// The fields that the caller gave.
    pub fields: SubscriptionFields,
    /// When it was created.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
    /// Starts at 1 and rises by 1 with every change.
    pub version: i64,
}

/// The result of a request to create an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Created<T> {
    /// It was created.
    New(T),
    /// It existed before, and was not changed.
    Existing(T),
}

/// Which subscriptions to list. Every given condition must hold.
#[derive(Clone, Debug, Default)]
pub struct SubscriptionFilter {
    /// Only subscriptions of this subscriber.
    pub subscriber_id: Option<String>,
    /// Only subscriptions to this definition.
    pub definition_id: Option<String>,
}

/// The page of a list to read.
#[derive(Clone, Debug, Default)]
pub struct PageRequest {
    /// Reads the entries after this id. Cheaper than `page`, which must read all pages before it.
    pub after: Option<String>,
    /// The number of the page, from 0. Not used with `after`.
    pub page: u32,
    /// The number of entries per page.
    pub size: u32,
}

/// One page of a list, oldest first.
#[derive(Clone, Debug)]
pub struct Page<T> {
    /// The items of this page.
    pub items: Vec<T>,
    /// The number of entries in the whole list.
    pub total: u64,
    /// True if another page follows.
    pub has_more: bool,
}

/// Why the registry refused a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// Another definition has this key.
    #[error("a definition with this key exists already")]
    Duplicate,
    /// No entry has this id.
    #[error("there is nothing with this id")]
    NotFound,
    /// Subscriptions refer to the definition.
    #[error("the definition has subscriptions: delete them first")]
    InUse,
    /// The entry changed since the caller read it.
    #[error("it is at version {found} and not at {expected}: read it again")]
    Stale {
        /// The version that the caller expects.
        expected: i64,
        /// The version in the registry.
        found: i64,
    },
    /// The subscription refers to a definition that does not exist.
    #[error("there is no definition with this id")]
    UnknownDefinition,
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}
