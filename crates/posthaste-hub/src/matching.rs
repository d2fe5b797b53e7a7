use std::collections::HashMap;
use std::sync::Arc;

use posthaste_api::ANY;
use posthaste_api::proto::{EventHubEvent, PayloadType};
use posthaste_core::StoreError;
use posthaste_core::hub_store::{Definition, Registry, Subscription, SubscriptionFields};
use tokio::sync::Mutex;

/// Finds the active subscriptions that match an event.
///
/// It is never stale: every batch first compares the version of the registry, which costs one small read. So an event
/// that is accepted after the response 201 to a new subscription always reaches that subscription.
pub(crate) struct SubscriptionMatcher {
    registry: Arc<dyn Registry>,
    loaded: Mutex<Arc<ActiveSubscriptions>>,
}

/// Active subscriptions by the event type that they name.
#[derive(Default)]
pub(crate) struct ActiveSubscriptions {
    version: Option<i64>,
    by_type: HashMap<String, Vec<Arc<ActiveSubscription>>>,
    any_type: Vec<Arc<ActiveSubscription>>,
}

/// One active subscription with its definition.
pub(crate) struct ActiveSubscription {
    definition: Definition,
    pub(crate) subscription: Subscription,
}

impl SubscriptionMatcher {
    pub(crate) fn new(registry: Arc<dyn Registry>) -> Self {
        Self { registry, loaded: Mutex::default() }
    }

    /// The current active subscriptions.
    pub(crate) async fn current(&self) -> Result<Arc<ActiveSubscriptions>, StoreError> {
        let mut loaded = self.loaded.lock().await;
        if loaded.version != Some(self.registry.version().await?) {
            let (version, active) = self.registry.load_active().await?;
            *loaded = Arc::new(ActiveSubscriptions::new(version, active));
        }
        Ok(loaded.clone())
    }
}

impl ActiveSubscriptions {
    fn new(version: i64, active: Vec<(Definition, Subscription)>) -> Self {
        let mut subscriptions = Self { version: Some(version), ..Self::default() };
        for (definition, subscription) in active {
            let event_type = definition.fields.key.event_type.clone();
            let subscription = Arc::new(ActiveSubscription { definition, subscription });
            match event_type == ANY {
                true => subscriptions.any_type.push(subscription),
                false => subscriptions.by_type.entry(event_type).or_default().push(subscription),
            }
        }
        subscriptions
    }

    pub(crate) fn matching<'a>(
        &'a self,
        event: &'a EventHubEvent,
    ) -> impl Iterator<Item = &'a Arc<ActiveSubscription>> {
        let named = self.by_type.get(&event.event_type).into_iter().flatten();
        named.chain(&self.any_type).filter(|subscription| subscription.matches(event))
    }
}

impl ActiveSubscription {
    /// True if the event matches. The event type is not compared here: the map has selected by it.
    fn matches(&self, event: &EventHubEvent) -> bool {
        let fits = |pattern: &str, value: Option<&str>| pattern == ANY || value == Some(pattern);
        let key = &self.definition.fields.key;
        let tenant = self.fields().tenant_id.as_ref();
        fits(&key.source_service, Some(&event.source_service))
            && fits(&key.resource_type, event.resource_type.as_deref())
            && fits(&key.operation_type, event.operation_type.as_deref())
            && tenant.is_none_or(|tenant| event.tenant_id.as_ref() == Some(tenant))
    }

    /// A subscription with this id to all events.
    #[cfg(test)]
    pub(crate) fn for_tests(id: &str) -> Self {
        use posthaste_core::hub_store::{DefinitionFields, EventKey};
        let any = || ANY.to_owned();
        let (created_at, updated_at) = Default::default();
        let key = EventKey { source_service: any(), event_type: any(), resource_type: any(), operation_type: any() };
        let fields = DefinitionFields { key, description: None };
        let definition = Definition { id: id.to_owned(), fields, created_at, updated_at, version: 1 };
        let fields = SubscriptionFields {
            subscriber_id: id.to_owned(),
            definition_id: id.to_owned(),
            endpoint: "http://127.0.0.1/".to_owned(),
            payload_type: "PAYLOAD_TYPE_JSON".to_owned(),
            auth_type: "NONE".to_owned(),
            endpoint_digest: Default::default(),
            credentials_sealed: Default::default(),
            header_names: Vec::new(),
            timeout: None,
            max_retry: None,
            tenant_id: None,
            active: true,
        };
        let subscription = Subscription { id: id.to_owned(), fields, created_at, updated_at, version: 1 };
        Self { definition, subscription }
    }

    pub(crate) fn fields(&self) -> &SubscriptionFields {
        &self.subscription.fields
    }

    pub(crate) fn payload_type(&self) -> PayloadType {
        PayloadType::from_str_name(&self.fields().payload_type).unwrap_or(PayloadType::Json)
    }
}
