use std::collections::HashMap;
use std::sync::Arc;

use posthaste_api::ANY;
use posthaste_api::proto::{EventHubEvent, PayloadType};
use posthaste_core::filter::Filter;
use posthaste_core::hub_store::{Definition, Subscription, SubscriptionFields};

use super::filtered::Filtered;
use super::payload::Payload;

/// The parts of a key: source service, event type, resource type, operation type, tenant.
const PARTS: usize = 5;

/// A key as the numbers of its names, so that a look-up hashes a few bytes.
type Key = [Name; PARTS];
type Name = u32;

/// Stands in a key for every value and for its absence.
const ANY_NAME: Name = 0;

/// The number of a subscription, in the order of creation.
pub(super) type Position = u32;

/// The active subscriptions by their whole key. An event costs one look-up for each combination of wildcards in use, at
/// most 32, however many subscriptions there are.
#[derive(Default)]
pub struct SubscriptionIndex {
    active: Vec<Arc<ActiveSubscription>>,
    names: HashMap<Box<str>, Name>,
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
            let key = index.key_of(&definition, &subscription.fields);
            let (unfiltered, filtered) = positions.entry(key).or_default();
            let list = if subscription.fields.filter.is_empty() { unfiltered } else { filtered };
            list.push(position);
            index.active.push(Arc::new(ActiveSubscription { subscription }));
        }
        for (key, (unfiltered, filtered)) in positions {
            let filtered = (!filtered.is_empty()).then(|| Box::new(Filtered::new(&filtered, &index.active)));
            index.keys.insert(key, Subscribed { unfiltered, filtered });
            let wildcards = key.map(|name| name == ANY_NAME);
            if !index.wildcards.contains(&wildcards) {
                index.wildcards.push(wildcards);
            }
        }
        index
    }

    /// The subscriptions that match the event, oldest first.
    pub fn matching(&self, event: &EventHubEvent) -> Vec<&Arc<ActiveSubscription>> {
        let name = |text: Option<&str>| self.names.get(text?).copied();
        let names = [
            name(Some(&event.source_service)),
            name(Some(&event.event_type)),
            name(event.resource_type.as_deref()),
            name(event.operation_type.as_deref()),
            name(event.tenant_id.as_deref()),
        ];
        let payload = Payload::new(event);
        let mut found = Vec::new();
        for subscribed in self.wildcards.iter().filter_map(|wildcards| self.keys.get(&key(names, wildcards)?)) {
            found.extend_from_slice(&subscribed.unfiltered);
            if let Some(filtered) = &subscribed.filtered {
                filtered.find(&payload, &self.active, &mut found);
            }
        }
        found.sort_unstable();
        found.into_iter().map(|position| &self.active[position as usize]).collect()
    }

    fn key_of(&mut self, definition: &Definition, fields: &SubscriptionFields) -> Key {
        let key = &definition.fields.key;
        [
            self.name_of(&key.source_service),
            self.name_of(&key.event_type),
            self.name_of(&key.resource_type),
            self.name_of(&key.operation_type),
            // A tenant is a name and no pattern: `*` is a tenant like any other.
            fields.tenant_id.as_deref().map_or(ANY_NAME, |tenant| self.numbered(tenant)),
        ]
    }

    fn name_of(&mut self, part: &str) -> Name {
        if part == ANY { ANY_NAME } else { self.numbered(part) }
    }

    fn numbered(&mut self, text: &str) -> Name {
        let next = self.names.len() as Name + 1;
        match self.names.get(text) {
            Some(name) => *name,
            None => *self.names.entry(text.into()).or_insert(next),
        }
    }
}

/// The key that subscriptions with these wildcards have if they match an event with these names. `None` if the
/// event has no such part, or no subscription names it.
fn key(names: [Option<Name>; PARTS], wildcards: &[bool; PARTS]) -> Option<Key> {
    let mut key = [ANY_NAME; PARTS];
    for (part, is_any) in wildcards.iter().enumerate() {
        if !is_any {
            key[part] = names[part]?;
        }
    }
    Some(key)
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
