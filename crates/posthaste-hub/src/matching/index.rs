use std::collections::HashMap;
use std::sync::Arc;

use posthaste_api::ANY;
use posthaste_api::proto::{EventHubEvent, PayloadType};
use posthaste_core::filter::Filter;
use posthaste_core::hub_store::{Definition, Subscription, SubscriptionFields};

use super::filtered::Filtered;
use super::key::{AnyKey, Key, PARTS, PartHasher};
use super::payload::Payload;

/// The number of a subscription, in the order of creation.
pub(super) type Position = u32;

/// The active subscriptions by their whole key. An event costs one look-up for each combination of wildcards in use, at
/// most 32, however many subscriptions there are.
#[derive(Default)]
pub struct SubscriptionIndex {
    active: Vec<Arc<ActiveSubscription>>,
    hasher: PartHasher,
    keys: HashMap<Key, Subscribed>,
    /// The combinations of wildcards in use: true for each part that is a wildcard.
    wildcards: Vec<[bool; PARTS]>,
}

/// The subscriptions of one key.
struct Subscribed {
    unfiltered: Vec<Position>,
    filtered: Option<Box<Filtered>>,
}

/// One active subscription.
pub struct ActiveSubscription {
    pub(crate) subscription: Subscription,
}

impl SubscriptionIndex {
    /// An index of these subscriptions with their definitions, oldest first.
    pub fn new(active: Vec<(Definition, Subscription)>) -> Self {
        let mut index = Self { active: Vec::with_capacity(active.len()), ..Self::default() };
        let mut positions: HashMap<Key, (Vec<Position>, Vec<Position>)> = HashMap::new();
        for (position, (definition, subscription)) in (0..).zip(active) {
            let key = key_of(&definition, &subscription.fields);
            let (unfiltered, filtered) = positions.entry(Key::new(&index.hasher.hashed(key))).or_default();
            let list = if subscription.fields.filter.is_empty() { unfiltered } else { filtered };
            list.push(position);
            index.active.push(Arc::new(ActiveSubscription { subscription }));
        }
        for (key, (unfiltered, filtered)) in positions {
            let filtered = (!filtered.is_empty()).then(|| Box::new(Filtered::new(&filtered, &index.active)));
            let wildcards = key.wildcards();
            if !index.wildcards.contains(&wildcards) {
                index.wildcards.push(wildcards);
            }
            index.keys.insert(key, Subscribed { unfiltered, filtered });
        }
        index
    }

    /// The subscriptions that match the event, oldest first.
    pub fn matching(&self, event: &EventHubEvent) -> Vec<&Arc<ActiveSubscription>> {
        let parts = self.hasher.hashed([
            Some(&event.source_service),
            Some(&event.event_type),
            event.resource_type.as_deref(),
            event.operation_type.as_deref(),
            event.tenant_id.as_deref(),
        ]);
        let payload = Payload::new(event);
        let mut found = Vec::new();
        for key in self.wildcards.iter().filter_map(|wildcards| parts.key(wildcards)) {
            let Some(subscribed) = self.keys.get(&key as &dyn AnyKey) else { continue };
            found.extend_from_slice(&subscribed.unfiltered);
            if let Some(filtered) = &subscribed.filtered {
                filtered.find(&payload, &self.active, &mut found);
            }
        }
        found.sort_unstable();
        found.into_iter().map(|position| &self.active[position as usize]).collect()
    }
}

/// The parts of the key of a subscription; wildcards are absent.
fn key_of<'a>(definition: &'a Definition, fields: &'a SubscriptionFields) -> [Option<&'a str>; PARTS] {
    let key = &definition.fields.key;
    let named = |part: &'a String| Some(part.as_str()).filter(|part| *part != ANY);
    [
        named(&key.source_service),
        named(&key.event_type),
        named(&key.resource_type),
        named(&key.operation_type),
        // A tenant is a name and no pattern: `*` is a tenant like any other.
        fields.tenant_id.as_deref(),
    ]
}

impl ActiveSubscription {
    /// The id of the subscription.
    pub fn id(&self) -> &str {
        &self.subscription.id
    }

    pub(crate) fn fields(&self) -> &SubscriptionFields {
        &self.subscription.fields
    }

    pub(crate) fn payload_type(&self) -> PayloadType {
        PayloadType::from_str_name(&self.fields().payload_type).unwrap_or(PayloadType::Json)
    }

    pub(super) fn filter(&self) -> &Filter {
        &self.fields().filter
    }

    /// A subscription with this id, without filter.
    #[cfg(test)]
    pub(crate) fn for_tests(id: &str) -> Self {
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
            filter: Filter::default(),
            active: true,
        };
        let (created_at, updated_at) = Default::default();
        Self { subscription: Subscription { id: id.to_owned(), fields, created_at, updated_at, version: 1 } }
    }
}
