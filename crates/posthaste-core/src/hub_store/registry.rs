use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, Utc};

use crate::StoreError;

/// Event definitions and subscriptions, with one version number that rises with every change.
///
/// # Laws
///
/// Each is a test of that name in `posthaste-backend-tests` (`hub_laws`).
///
/// - `definitions_are_made_changed_and_removed`: no two definitions have the same key. One that has subscriptions is not
///   deleted. What a change is refused for is found in the transaction that would make it.
/// - `subscriptions_are_made_changed_and_removed`: a subscription always refers to a definition that exists.
/// - `every_change_and_nothing_else_moves_the_version`: in the transaction of the change.
/// - `the_same_subscription_again_answers_with_the_one_that_is_there`: two subscriptions are the same if they have the same
///   subscriber, definition, tenant and digest of the address.
/// - `a_page_goes_on_behind_an_id`: lists are sorted by id, which is the order of creation.
/// - `sealed_credentials_are_remembered`: also when the subscription that had them is gone.
///
/// `expected` is the version that the caller read; `None` changes whatever is there. A row that cannot be read MUST be
/// reported and left out of lists, and MUST NOT keep others from being read.
#[async_trait]
pub trait Registry: DefinitionStore + SubscriptionStore + Send + Sync + 'static {
    /// Rises with every change. As long as it is the same, the answer of [`load_active`](Self::load_active) is current.
    async fn version(&self) -> Result<i64, StoreError>;

    /// Every active subscription with its definition, oldest first, and the version at which that holds.
    async fn load_active(&self) -> Result<(i64, Vec<(Definition, Subscription)>), StoreError>;
}

/// The definitions of a [`Registry`].
#[async_trait]
pub trait DefinitionStore {
    /// Makes a definition; its id is a UUID.
    async fn create_definition(&self, fields: DefinitionFields) -> Result<Definition, RegistryError>;

    /// Replaces the fields of a definition.
    async fn update_definition(
        &self,
        id: &str,
        fields: DefinitionFields,
        expected: Option<i64>,
    ) -> Result<Definition, RegistryError>;

    /// Removes a definition that no subscription refers to.
    async fn delete_definition(&self, id: &str, expected: Option<i64>) -> Result<(), RegistryError>;

    /// The definition with this id.
    async fn definition(&self, id: &str) -> Result<Option<Definition>, StoreError>;

    /// The definition with exactly this key: `*` is only itself here.
    async fn definition_of_key(&self, key: &EventKey) -> Result<Option<Definition>, StoreError>;

    /// One page of all definitions.
    async fn definitions(&self, request: PageRequest) -> Result<Page<Definition>, StoreError>;
}

/// The subscriptions of a [`Registry`].
#[async_trait]
pub trait SubscriptionStore {
    /// Makes a subscription, or answers with the same subscription if there is one. The caller chooses the id, because the
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

    /// Removes a subscription.
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

/// What identifies a kind of event; `*` in any place stands for anything.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EventKey {
    /// The service that publishes it.
    pub source_service: String,
    /// What happened.
    pub event_type: String,
    /// The kind of resource that it happened to.
    pub resource_type: String,
    /// The kind of operation.
    pub operation_type: String,
}

/// The fields of a definition that a caller gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefinitionFields {
    /// The events that it stands for. No two definitions have the same key.
    pub key: EventKey,
    /// For people.
    pub description: Option<String>,
}

/// A kind of event that can be subscribed to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Definition {
    /// A UUID.
    pub id: String,
    /// The fields that the caller gave.
    pub fields: DefinitionFields,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
    /// From 1, one more with every change.
    pub version: i64,
}

/// The fields of a subscription that a caller gives.
#[derive(Clone, PartialEq, Eq)]
pub struct SubscriptionFields {
    /// The subscriber.
    pub subscriber_id: String,
    /// The definition that it subscribes to.
    pub definition_id: String,
    /// Where events go, without the values of the query string.
    pub endpoint: String,
    /// The digest of the whole address.
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
    /// False if no events are matched.
    pub active: bool,
}

impl std::fmt::Debug for SubscriptionFields {
    /// Without the sealed credentials and the digest, which nobody can read.
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

/// A subscription to a kind of event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subscription {
    /// A UUID.
    pub id: String,
    /// The fields that the caller gave.
    pub fields: SubscriptionFields,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
    /// From 1, one more with every change.
    pub version: i64,
}

/// The answer to a request to make something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Created<T> {
    /// It was made.
    New(T),
    /// It existed before, and stays as it is.
    Existing(T),
}

/// Which subscriptions to list. Every given condition must hold.
#[derive(Clone, Debug, Default)]
pub struct SubscriptionFilter {
    /// Of this subscriber.
    pub subscriber_id: Option<String>,
    /// To this definition.
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
    /// The items of this page.
    pub items: Vec<T>,
    /// How many there are in all.
    pub total: u64,
    /// True if another page follows.
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
        /// The version that the caller expects.
        expected: i64,
        /// The version in the registry.
        found: i64,
    },
    /// The subscription refers to a definition that is not there.
    #[error("there is no definition with this id")]
    UnknownDefinition,
    /// The database did not do what it was asked.
    #[error(transparent)]
    Store(#[from] StoreError),
}
