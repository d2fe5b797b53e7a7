use std::sync::Arc;

use bytes::Bytes;
use posthaste_api::{
    AuthIn, AuthOut, EventKey, FieldError, Headers, MASK, NewSubscription, PayloadType, Protocol, Target,
    is_masked_endpoint, masked_endpoint,
};
use posthaste_core::hub_store::{
    self, Created, DefinitionFields, PageRequest, Registry, RegistryError, SubscriptionFields, SubscriptionFilter,
};
use posthaste_core::{FaultKind, StoreError};
use posthaste_webhook::{EgressGuard, Endpoint};
use uuid::Uuid;

use crate::credentials::{Credentials, with_old_secret, with_old_values};
use crate::secrets::{Sealer, SecretError, plain_digest};

/// Definitions and subscriptions: checks input before it is stored, and masks secrets in output.
#[derive(Clone)]
pub struct Registrations {
    registry: Arc<dyn Registry>,
    sealer: Sealer,
    egress: EgressGuard,
}

/// Why a request was refused. Nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistrationError {
    #[error("the input is refused")]
    Invalid(Vec<FieldError>),
    #[error("there is no definition with this {0}: create one first")]
    UnknownDefinition(&'static str),
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error("the credentials cannot be sealed")]
    Secret(#[from] SecretError),
}

impl From<StoreError> for RegistrationError {
    fn from(error: StoreError) -> Self {
        Self::Registry(RegistryError::Store(error))
    }
}

/// A definition or subscription, with the version that `If-Match` compares.
pub struct Versioned<T> {
    pub value: T,
    pub version: i64,
}

/// One page of a list.
pub struct Listed<T> {
    pub items: Vec<T>,
    pub total: u64,
    /// True if another page follows.
    pub has_more: bool,
}

impl Registrations {
    pub(crate) fn new(registry: Arc<dyn Registry>, sealer: Sealer, egress: EgressGuard) -> Self {
        Self { registry, sealer, egress }
    }

    pub async fn create_definition(
        &self,
        key: EventKey,
        description: Option<String>,
    ) -> Result<Versioned<posthaste_api::Definition>, RegistrationError> {
        let fields = DefinitionFields { key: stored_key(key), description };
        Ok(shown_definition(self.registry.create_definition(fields).await?))
    }

    pub async fn update_definition(
        &self,
        id: Uuid,
        key: EventKey,
        description: Option<String>,
        expected: Option<i64>,
    ) -> Result<Versioned<posthaste_api::Definition>, RegistrationError> {
        let fields = DefinitionFields { key: stored_key(key), description };
        Ok(shown_definition(self.registry.update_definition(&id.to_string(), fields, expected).await?))
    }

    pub async fn delete_definition(&self, id: Uuid, expected: Option<i64>) -> Result<(), RegistrationError> {
        Ok(self.registry.delete_definition(&id.to_string(), expected).await?)
    }

    pub async fn definition(&self, id: Uuid) -> Result<Versioned<posthaste_api::Definition>, RegistrationError> {
        let found = self.registry.definition(&id.to_string()).await?;
        Ok(shown_definition(found.ok_or(RegistryError::NotFound)?))
    }

    pub async fn definitions(
        &self,
        request: PageRequest,
    ) -> Result<Listed<posthaste_api::Definition>, RegistrationError> {
        let page = self.registry.definitions(request).await?;
        let items = page.items.into_iter().map(|definition| shown_definition(definition).value).collect();
        Ok(Listed { items, total: page.total, has_more: page.has_more })
    }

    /// Creates a subscription, or returns the existing one of the same subscriber, events, tenant, filter and
    /// endpoint.
    pub async fn create_subscription(
        &self,
        new: NewSubscription,
    ) -> Result<Created<Versioned<posthaste_api::Subscription>>, RegistrationError> {
        let id = Uuid::now_v7();
        let auth = new.auth.clone().unwrap_or(AuthIn::None {});
        let headers = new.headers.clone().unwrap_or_default().0;
        let credentials = Credentials::new(auth, &new.endpoint, headers);
        let fields = self.stored(id, new, credentials).await?;
        Ok(match self.registry.create_subscription(&id.to_string(), fields).await? {
            Created::New(made) => Created::New(self.shown(made).await?),
            Created::Existing(found) => Created::Existing(self.shown(found).await?),
        })
    }

    /// Replaces a subscription. A secret that is not given keeps its stored value.
    pub async fn update_subscription(
        &self,
        id: Uuid,
        new: NewSubscription,
        expected: Option<i64>,
    ) -> Result<Versioned<posthaste_api::Subscription>, RegistrationError> {
        let before = self.registry.subscription(&id.to_string()).await?.ok_or(RegistryError::NotFound)?;
        // Old secrets are opened only if no new ones are given, so that new secrets can be entered after the key is
        // lost.
        let (new, credentials, expected) = match keeps_secrets(&new, &before.fields) {
            // Another request may change the secrets now, so the update compares the version that was read.
            true => {
                let (new, credentials) = with_stored(new, &before.fields, self.opened(&before)?)?;
                (new, credentials, expected.or(Some(before.version)))
            }
            false => {
                let auth = new.auth.clone().unwrap_or(AuthIn::None {});
                let headers = new.headers.clone().unwrap_or_default().0;
                let credentials = Credentials::new(auth, &new.endpoint, headers);
                (new, credentials, expected)
            }
        };
        let fields = self.stored(id, new, credentials).await?;
        self.shown(self.registry.update_subscription(&id.to_string(), fields, expected).await?).await
    }

    pub async fn delete_subscription(&self, id: Uuid, expected: Option<i64>) -> Result<(), RegistrationError> {
        Ok(self.registry.delete_subscription(&id.to_string(), expected).await?)
    }

    pub async fn subscription(&self, id: Uuid) -> Result<Versioned<posthaste_api::Subscription>, RegistrationError> {
        let found = self.registry.subscription(&id.to_string()).await?;
        self.shown(found.ok_or(RegistryError::NotFound)?).await
    }

    pub async fn subscriptions(
        &self,
        filter: &SubscriptionFilter,
        request: PageRequest,
    ) -> Result<Listed<posthaste_api::Subscription>, RegistrationError> {
        let page = self.registry.subscriptions(filter, request).await?;
        let mut items = Vec::with_capacity(page.items.len());
        for subscription in page.items {
            let id = subscription.id.clone();
            match self.shown(subscription).await {
                Ok(shown) => items.push(shown.value),
                // One subscription whose definition cannot be read must not hide the others.
                Err(error) if is_permanent(&error) => {
                    tracing::error!(subscription = id, %error, "a subscription cannot be shown and is left out");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Listed { items, total: page.total, has_more: page.has_more })
    }

    async fn stored(
        &self,
        id: Uuid,
        new: NewSubscription,
        credentials: Credentials,
    ) -> Result<SubscriptionFields, RegistrationError> {
        let endpoint = self.usable_endpoint(&new.endpoint).await?;
        Ok(SubscriptionFields {
            subscriber_id: new.subscriber_id,
            definition_id: self.definition_id(new.target).await?,
            endpoint_digest: self.digest(&endpoint),
            endpoint: masked_endpoint(&new.endpoint),
            payload_type: payload_type_name(new.payload_type).to_owned(),
            auth_type: credentials.auth.public().type_name().to_owned(),
            credentials_sealed: credentials.seal(&self.sealer, &id.to_string())?,
            header_names: credentials.headers.into_iter().map(|(name, _)| name).collect(),
            timeout: new.timeout,
            max_retry: new.max_retry,
            tenant_id: new.tenant_id,
            filter: new.filter,
            active: new.active,
        })
    }

    /// The endpoint, if requests can be sent to it. The address of a name may still change, so it is judged again at
    /// each connection.
    async fn usable_endpoint(&self, text: &str) -> Result<Endpoint, RegistrationError> {
        let refused = |why: String| RegistrationError::Invalid(vec![FieldError::new("endpoint", why)]);
        let endpoint = Endpoint::parse(text).map_err(|error| refused(error.to_string()))?;
        self.egress.check(&endpoint).await.map_err(|denied| refused(denied.to_string()))?;
        Ok(endpoint)
    }

    async fn definition_id(&self, target: Target) -> Result<String, RegistrationError> {
        match target {
            Target::Definition(id) => match self.registry.definition(&id.to_string()).await? {
                Some(definition) => Ok(definition.id),
                None => Err(RegistrationError::UnknownDefinition("id")),
            },
            Target::Key(key) => match self.registry.definition_of_key(&stored_key(key)).await? {
                Some(definition) => Ok(definition.id),
                None => Err(RegistrationError::UnknownDefinition("key")),
            },
        }
    }

    /// The digest that identifies a URL, which the database does not store in full. A query string may be a secret that
    /// is easy to guess, so its digest needs the key.
    fn digest(&self, endpoint: &Endpoint) -> Bytes {
        let address = endpoint.uri().to_string();
        match endpoint.uri().query() {
            Some(_) => self.sealer.keyed_digest(address.as_bytes()).into(),
            None => plain_digest(address.as_bytes()).into(),
        }
    }

    fn opened(&self, subscription: &hub_store::Subscription) -> Result<Credentials, RegistrationError> {
        Ok(Credentials::open(&self.sealer, &subscription.id, &subscription.fields.credentials_sealed)?)
    }

    async fn shown(
        &self,
        subscription: hub_store::Subscription,
    ) -> Result<Versioned<posthaste_api::Subscription>, RegistrationError> {
        // Without the key, the type of the credentials can still be shown.
        let auth = match self.opened(&subscription) {
            Ok(credentials) => credentials.auth.public(),
            Err(_) => AuthOut::of_type(&subscription.fields.auth_type),
        };
        let definition = self.registry.definition(&subscription.fields.definition_id).await?;
        let definition = definition.ok_or(RegistryError::NotFound)?;
        let fields = subscription.fields;
        let value = posthaste_api::Subscription {
            id: parsed(&subscription.id),
            subscriber_id: fields.subscriber_id,
            definition_id: parsed(&definition.id),
            event_key: shown_key(definition.fields.key),
            endpoint: fields.endpoint,
            protocol: Protocol::Http,
            payload_type: payload_type_of(&fields.payload_type),
            auth,
            headers: Headers(fields.header_names.into_iter().map(|name| (name, MASK.to_owned())).collect()),
            timeout: fields.timeout.map(posthaste_api::format_duration),
            max_retry: fields.max_retry,
            tenant_id: fields.tenant_id,
            filter: fields.filter.into(),
            active: fields.active,
            created_at: subscription.created_at,
            updated_at: subscription.updated_at,
        };
        Ok(Versioned { value, version: subscription.version })
    }
}

/// True if the same request would fail again.
fn is_permanent(error: &RegistrationError) -> bool {
    match error {
        RegistrationError::Registry(RegistryError::Store(error)) => error.kind() == FaultKind::Permanent,
        _ => true,
    }
}

/// True if the replacement keeps a stored secret.
fn keeps_secrets(new: &NewSubscription, before: &SubscriptionFields) -> bool {
    let keeps_auth = match &new.auth {
        Some(auth) => auth.keeps_secret(),
        None => before.auth_type != AuthOut::None.type_name(),
    };
    let keeps_headers = match &new.headers {
        Some(headers) => headers.0.iter().any(|(_, value)| value == MASK),
        None => !before.header_names.is_empty(),
    };
    keeps_auth || keeps_headers || is_masked_endpoint(&new.endpoint)
}

/// The replacement, with the stored value for each secret that it leaves out or masks.
fn with_stored(
    mut new: NewSubscription,
    before: &SubscriptionFields,
    old: Credentials,
) -> Result<(NewSubscription, Credentials), RegistrationError> {
    let mut errors = Vec::new();
    if is_masked_endpoint(&new.endpoint) {
        // Only for exactly the URL that was shown: a token must not be sent to another host.
        match (old.endpoint, new.endpoint == before.endpoint) {
            (Some(endpoint), true) => new.endpoint = endpoint,
            _ => {
                let why = format!("has {MASK} instead of a value: give the whole address, or leave it as it is shown");
                errors.push(FieldError::new("endpoint", why));
            }
        }
    }
    let auth = match new.auth.clone() {
        Some(auth) => with_old_secret(auth, &old.auth),
        None => Ok(old.auth),
    };
    let headers = match new.headers.clone() {
        Some(headers) => with_old_values(headers, &old.headers),
        None => Ok(old.headers),
    };
    match (auth, headers) {
        (Ok(auth), Ok(headers)) if errors.is_empty() => {
            let credentials = Credentials::new(auth, &new.endpoint, headers);
            Ok((new, credentials))
        }
        (auth, headers) => {
            errors.extend(auth.err());
            errors.extend(headers.err());
            Err(RegistrationError::Invalid(errors))
        }
    }
}

fn payload_type_name(payload_type: PayloadType) -> &'static str {
    posthaste_api::proto::PayloadType::from(payload_type).as_str_name()
}

fn payload_type_of(name: &str) -> PayloadType {
    match posthaste_api::proto::PayloadType::from_str_name(name) {
        Some(posthaste_api::proto::PayloadType::Binary) => PayloadType::Binary,
        _ => PayloadType::Json,
    }
}

fn shown_definition(definition: hub_store::Definition) -> Versioned<posthaste_api::Definition> {
    let value = posthaste_api::Definition {
        id: parsed(&definition.id),
        key: shown_key(definition.fields.key),
        description: definition.fields.description,
        created_at: definition.created_at,
        updated_at: definition.updated_at,
    };
    Versioned { value, version: definition.version }
}

fn stored_key(key: EventKey) -> hub_store::EventKey {
    hub_store::EventKey {
        source_service: key.source_service,
        event_type: key.event_type,
        resource_type: key.resource_type,
        operation_type: key.operation_type,
    }
}

fn shown_key(key: hub_store::EventKey) -> EventKey {
    EventKey {
        source_service: key.source_service,
        event_type: key.event_type,
        resource_type: key.resource_type,
        operation_type: key.operation_type,
    }
}

/// Ids in the hub's tables are always UUIDs, because the hub makes them.
fn parsed(id: &str) -> Uuid {
    Uuid::parse_str(id).unwrap_or_default()
}
