use std::collections::HashMap;
use std::sync::Arc;

use posthaste_api::ANY;
use posthaste_api::proto::{EventHubEvent, PayloadType};
use posthaste_core::StoreError;
use posthaste_sql::registry::{Definition, Subscription, SubscriptionFields};
use posthaste_sql::sqlite::Registry;
use tokio::sync::Mutex;

/// Who subscribed to what, as of now.
///
/// Never stale: every look first compares the registry's version, which costs one tiny read for a whole batch. So an
/// event accepted after a subscription's 201 always reaches it.
pub(crate) struct Subscribers {
    registry: Registry,
    known: Mutex<Arc<Routes>>,
}

/// Active subscriptions by the event type that they name.
#[derive(Default)]
pub(crate) struct Routes {
    version: Option<i64>,
    by_type: HashMap<String, Vec<Arc<Route>>>,
    any_type: Vec<Arc<Route>>,
}

/// One subscription and the key of events that it is for.
pub(crate) struct Route {
    definition: Definition,
    pub(crate) subscription: Subscription,
}

impl Subscribers {
    pub(crate) fn new(registry: Registry) -> Self {
        Self { registry, known: Mutex::default() }
    }

    pub(crate) async fn routes(&self) -> Result<Arc<Routes>, StoreError> {
        let mut known = self.known.lock().await;
        if known.version != Some(self.registry.version().await?) {
            let (version, active) = self.registry.load_active().await?;
            *known = Arc::new(Routes::new(version, active));
        }
        Ok(known.clone())
    }
}

impl Routes {
    fn new(version: i64, active: Vec<(Definition, Subscription)>) -> Self {
        let mut routes = Self { version: Some(version), ..Self::default() };
        for (definition, subscription) in active {
            let event_type = definition.fields.key.event_type.clone();
            let route = Arc::new(Route { definition, subscription });
            match event_type == ANY {
                true => routes.any_type.push(route),
                false => routes.by_type.entry(event_type).or_default().push(route),
            }
        }
        routes
    }

    pub(crate) fn matching<'a>(&'a self, event: &'a EventHubEvent) -> impl Iterator<Item = &'a Arc<Route>> {
        let named = self.by_type.get(&event.event_type).into_iter().flatten();
        named.chain(&self.any_type).filter(|route| route.is_for(event))
    }
}

impl Route {
    /// The event type is compared by the map already.
    fn is_for(&self, event: &EventHubEvent) -> bool {
        let fits = |wanted: &str, value: Option<&str>| wanted == ANY || value == Some(wanted);
        let key = &self.definition.fields.key;
        let tenant = self.fields().tenant_id.as_ref();
        fits(&key.source_service, Some(&event.source_service))
            && fits(&key.resource_type, event.resource_type.as_deref())
            && fits(&key.operation_type, event.operation_type.as_deref())
            && tenant.is_none_or(|tenant| event.tenant_id.as_ref() == Some(tenant))
    }

    /// A route of a subscription with this id to all events.
    #[cfg(test)]
    pub(crate) fn for_tests(id: &str) -> Self {
        use posthaste_sql::registry::{DefinitionFields, EventKey};
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
