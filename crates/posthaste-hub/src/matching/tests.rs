use posthaste_api::proto::EventHubEvent;
use posthaste_api::proto::event_hub_event::Event;
use posthaste_core::filter::{Filter, Json};
use posthaste_core::hub_store::{Definition, DefinitionFields, EventKey, Subscription};
use proptest::prelude::*;

use super::*;

/// The parts of a key, and the tenant of a subscription.
type Parts = ([&'static str; 4], Option<&'static str>);

fn pair(position: usize, (key, tenant_id): Parts, filter: &str) -> (Definition, Subscription) {
    let [source_service, event_type, resource_type, operation_type] = key.map(str::to_owned);
    let key = EventKey { source_service, event_type, resource_type, operation_type };
    let (created_at, updated_at) = Default::default();
    let fields = DefinitionFields { key, description: None };
    let definition = Definition { id: String::new(), fields, created_at, updated_at, version: 1 };
    let mut subscription = ActiveSubscription::for_tests(&position.to_string()).subscription;
    subscription.fields.tenant_id = tenant_id.map(str::to_owned);
    subscription.fields.filter = serde_json::from_str(filter).unwrap();
    (definition, subscription)
}

fn event(source: &str, event_type: &str, resource: Option<&str>, operation: Option<&str>) -> EventHubEvent {
    EventHubEvent {
        source_service: source.to_owned(),
        event_type: event_type.to_owned(),
        resource_type: resource.map(str::to_owned),
        operation_type: operation.map(str::to_owned),
        ..EventHubEvent::default()
    }
}

fn ids(index: &SubscriptionIndex, event: &EventHubEvent) -> Vec<String> {
    index.matching(event).into_iter().map(|active| active.id().to_owned()).collect()
}

/// What the index must return: a comparison of every subscription, part by part.
fn scan(pairs: &[(Definition, Subscription)], event: &EventHubEvent) -> Vec<String> {
    let fits = |pattern: &str, value: Option<&str>| pattern == "*" || value == Some(pattern);
    let json = match &event.event {
        Some(Event::JsonText(text)) => Json::parse(text.as_bytes()),
        _ => None,
    };
    let is_match = |(definition, subscription): &&(Definition, Subscription)| {
        let (key, fields) = (&definition.fields.key, &subscription.fields);
        let filter: &Filter = &fields.filter;
        fits(&key.source_service, Some(&event.source_service))
            && fits(&key.event_type, Some(&event.event_type))
            && fits(&key.resource_type, event.resource_type.as_deref())
            && fits(&key.operation_type, event.operation_type.as_deref())
            && (fields.tenant_id.is_none() || fields.tenant_id == event.tenant_id)
            && (filter.is_empty() || json.as_ref().is_some_and(|json| filter.matches(json)))
    };
    pairs.iter().filter(is_match).map(|(_, subscription)| subscription.id.clone()).collect()
}

#[test]
fn a_wildcard_matches_every_value_and_its_absence() {
    let keys =
        [["*", "*", "*", "*"], ["shop", "*", "*", "*"], ["*", "placed", "order", "*"], ["*", "*", "*", "create"]];
    let pairs = keys.into_iter().enumerate().map(|(position, key)| pair(position, (key, None), "[]")).collect();
    let index = SubscriptionIndex::new(pairs);
    assert_eq!(ids(&index, &event("shop", "placed", Some("order"), Some("create"))), ["0", "1", "2", "3"]);
    assert_eq!(ids(&index, &event("shop", "placed", None, None)), ["0", "1"]);
    assert_eq!(ids(&index, &event("", "placed", Some("order"), None)), ["0", "2"]);
    // A name counts only in its own part, and an event cannot use the wildcard.
    assert_eq!(ids(&index, &event("order", "shop", Some("create"), Some("placed"))), ["0"]);
    assert_eq!(ids(&index, &event("*", "*", Some("*"), Some("*"))), ["0"]);
}

#[test]
fn an_event_without_a_tenant_matches_only_subscriptions_without_one() {
    let any = ["*", "*", "*", "*"];
    let tenants = [None, Some("acme"), Some("*")];
    let pairs = tenants.into_iter().enumerate().map(|(position, tenant)| pair(position, (any, tenant), "[]")).collect();
    let index = SubscriptionIndex::new(pairs);
    let of_tenant = |tenant: Option<&str>| {
        let event = EventHubEvent { tenant_id: tenant.map(str::to_owned), ..event("shop", "placed", None, None) };
        ids(&index, &event)
    };
    assert_eq!(of_tenant(None), ["0"]);
    assert_eq!(of_tenant(Some("acme")), ["0", "1"]);
    assert_eq!(of_tenant(Some("other")), ["0"]);
    assert_eq!(of_tenant(Some("*")), ["0", "2"], "a tenant is no pattern");
}

#[test]
fn a_payload_that_is_not_json_matches_no_filter() {
    let any = (["*", "*", "*", "*"], None);
    let filters = ["[]", r#"[{"path":"/a","op":"ne","value":1}]"#, r#"[{"path":"/a","op":"eq","value":2}]"#];
    let pairs = filters.into_iter().enumerate().map(|(position, filter)| pair(position, any, filter)).collect();
    let index = SubscriptionIndex::new(pairs);
    let with = |payload: Option<Event>, content_type: Option<&str>| {
        let content_type = content_type.map(str::to_owned);
        ids(&index, &EventHubEvent { event: payload, content_type, ..event("shop", "placed", None, None) })
    };
    let text = |text: &str| Some(Event::JsonText(text.to_owned()));
    let bytes = |text: &'static str| Some(Event::RawBytes(text.as_bytes().into()));
    assert_eq!(with(text(r#"{"a": 2}"#), None), ["0", "1", "2"]);
    assert_eq!(with(text(r#"{"a": 1.0}"#), Some("text/plain")), ["0"]);
    assert_eq!(with(text("not JSON"), Some("application/json")), ["0"]);
    assert_eq!(with(None, None), ["0"]);
    assert_eq!(with(bytes(r#"{"a":2}"#), None), ["0", "1", "2"]);
    assert_eq!(with(bytes(r#"{"a":2}"#), Some("Application/JSON; charset=utf-8")), ["0", "1", "2"]);
    assert_eq!(with(bytes(r#"{"a":2}"#), Some("application/cloudevents+json")), ["0", "1", "2"]);
    assert_eq!(with(bytes(r#"{"a":2}"#), Some("application/octet-stream")), ["0"]);
}

#[test]
fn the_rarest_value_of_a_filter_is_indexed() {
    let any = (["*", "*", "*", "*"], None);
    let filter = |customer: usize| {
        format!(r#"[{{"path":"/kind","op":"eq","value":"order"}},{{"path":"/customer","op":"eq","value":{customer}}}]"#)
    };
    let pairs = (0..20_000).map(|customer| pair(customer, any, &filter(customer))).collect();
    let index = SubscriptionIndex::new(pairs);
    let of = |customer: usize| EventHubEvent {
        event: Some(Event::JsonText(format!(r#"{{"kind":"order","customer":{customer}}}"#))),
        ..event("shop", "placed", None, None)
    };
    // With an index on the kind, this would compare 400 million subscriptions.
    (0..20_000).for_each(|customer| assert_eq!(ids(&index, &of(customer)), [customer.to_string()]));
}

const CONDITIONS: &[&str] = &[
    r#"{"path":"/a","op":"eq","value":1}"#,
    r#"{"path":"/a","op":"eq","value":1.0}"#,
    r#"{"path":"/a","op":"eq","value":"x"}"#,
    r#"{"path":"/a","op":"eq","value":null}"#,
    r#"{"path":"/a","op":"eq","value":{"b":1}}"#,
    r#"{"path":"/a","op":"in","value":[1, "x", 10e-1]}"#,
    r#"{"path":"/a","op":"ne","value":1}"#,
    r#"{"path":"/a/b","op":"eq","value":1}"#,
    r#"{"path":"/a/b","op":"exists"}"#,
    r#"{"path":"/b","op":"prefix","value":"x"}"#,
    r#"{"path":"/b","op":"in","value":["x", "xy", null]}"#,
    r#"{"path":"/b","op":"exists","value":false}"#,
    r#"{"path":"","op":"eq","value":{"a":1}}"#,
];

const PAYLOADS: &[&str] = &[
    "{}",
    r#"{"a":1}"#,
    r#"{"a":1.00,"b":"xy"}"#,
    r#"{"a":"x","b":"x"}"#,
    r#"{"a":null,"b":null}"#,
    r#"{"a":{"b":1e0}}"#,
    r#"{"a":2,"a":1}"#,
    "[1]",
    "1",
    "not JSON",
];

fn part() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["*", "*", "p", "q"])
}

fn subscription() -> impl Strategy<Value = (Parts, String)> {
    let key = [part(), part(), part(), part()];
    let tenant = prop::option::of(prop::sample::select(vec!["p", "t"]));
    let filter = prop::collection::vec(prop::sample::select(CONDITIONS), 0..3);
    ((key, tenant), filter.prop_map(|conditions| format!("[{}]", conditions.join(","))))
}

fn published() -> impl Strategy<Value = EventHubEvent> {
    let part = || prop::option::of(prop::sample::select(vec!["p", "q", "unknown"]));
    let parts = (part(), part(), part(), part(), prop::option::of(prop::sample::select(vec!["p", "t", "unknown"])));
    (parts, prop::option::of(prop::sample::select(PAYLOADS))).prop_map(
        |((source, event_type, resource, operation, tenant), payload)| EventHubEvent {
            tenant_id: tenant.map(str::to_owned),
            event: payload.map(|text| Event::JsonText(text.to_owned())),
            ..event(source.unwrap_or_default(), event_type.unwrap_or("r"), resource, operation)
        },
    )
}

proptest! {
    #[test]
    fn the_index_returns_what_a_scan_returns(
        subscriptions in prop::collection::vec(subscription(), 0..60),
        events in prop::collection::vec(published(), 1..20),
    ) {
        let pairs = || -> Vec<_> {
            let numbered = subscriptions.iter().enumerate();
            numbered.map(|(position, (parts, filter))| pair(position, *parts, filter)).collect()
        };
        let (index, pairs) = (SubscriptionIndex::new(pairs()), pairs());
        for event in &events {
            prop_assert_eq!(ids(&index, event), scan(&pairs, event), "{:?}", event);
        }
    }
}
