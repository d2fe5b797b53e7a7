//! The laws of [`Registry`].

use std::sync::Arc;

use bytes::Bytes;
use posthaste_core::filter::Filter;
use posthaste_core::hub_store::{
    Created, DefinitionFields, EventKey, PageRequest, Registry, RegistryError, Subscription, SubscriptionFields,
    SubscriptionFilter,
};

use super::{HubHarness, options};

fn definition(event_type: &str) -> DefinitionFields {
    let key = EventKey {
        source_service: "shop".to_owned(),
        event_type: event_type.to_owned(),
        resource_type: "order".to_owned(),
        operation_type: "*".to_owned(),
    };
    DefinitionFields { key, description: None }
}

fn subscription(definition_id: &str, subscriber_id: &str) -> SubscriptionFields {
    SubscriptionFields {
        subscriber_id: subscriber_id.to_owned(),
        definition_id: definition_id.to_owned(),
        endpoint: "https://example.com/hook".to_owned(),
        endpoint_digest: Bytes::from_static(b"digest of the address"),
        payload_type: "PAYLOAD_TYPE_JSON".to_owned(),
        auth_type: "NONE".to_owned(),
        credentials_sealed: Bytes::from_static(&[0, 255, 1]),
        header_names: vec!["x-b".to_owned(), "x-a".to_owned()],
        timeout: Some(std::time::Duration::from_millis(1_500)),
        max_retry: Some(0),
        tenant_id: None,
        filter: Filter::default(),
        active: true,
    }
}

/// A filter whose numbers a database could change, and whose null could get lost.
fn filter() -> Filter {
    let text = r#"[{"path":"/total","op":"in","value":[1.50,18446744073709551617,1e400]},
        {"path":"/a~1b","op":"ne","value":null},{"path":"","op":"exists"},
        {"path":"/name","op":"prefix","value":"it's \u0000 \"é\""}]"#;
    serde_json::from_str(text).unwrap()
}

async fn create(registry: &Arc<dyn Registry>, fields: SubscriptionFields) -> Subscription {
    match registry.create_subscription(&new_id(), fields).await.unwrap() {
        Created::New(subscription) => subscription,
        Created::Existing(subscription) => panic!("it existed before: {subscription:?}"),
    }
}

const ALL: PageRequest = PageRequest { after: None, page: 0, size: 100 };

/// No two definitions have the same key, and changes compare versions.
pub async fn definitions_are_made_changed_and_removed(harness: &impl HubHarness) {
    let registry = harness.open(options()).await.registry;
    let made = registry.create_definition(definition("placed")).await.unwrap();
    assert_eq!((made.version, &made.fields), (1, &definition("placed")));
    assert_eq!(registry.definition(&made.id).await.unwrap(), Some(made.clone()));
    assert_eq!(registry.definition_of_key(&made.fields.key).await.unwrap(), Some(made.clone()));
    let twin = registry.create_definition(definition("placed")).await;
    assert!(matches!(twin, Err(RegistryError::Duplicate)));
    let other = registry.create_definition(definition("paid")).await.unwrap();
    let clash = registry.update_definition(&other.id, definition("placed"), None).await;
    assert!(matches!(clash, Err(RegistryError::Duplicate)));

    let described = DefinitionFields { description: Some("an order".to_owned()), ..definition("placed") };
    let changed = registry.update_definition(&made.id, described.clone(), Some(1)).await.unwrap();
    assert_eq!((changed.version, changed.fields), (2, described.clone()));
    let stale = registry.update_definition(&made.id, described.clone(), Some(1)).await;
    assert!(matches!(stale, Err(RegistryError::Stale { expected: 1, found: 2 })));
    let missing = registry.update_definition("unknown", described, None).await;
    assert!(matches!(missing, Err(RegistryError::NotFound)));

    let page = registry.definitions(PageRequest { after: None, page: 1, size: 1 }).await.unwrap();
    assert_eq!((page.total, page.items), (2, vec![other.clone()]));
    assert!(matches!(registry.delete_definition(&other.id, Some(7)).await, Err(RegistryError::Stale { .. })));
    registry.delete_definition(&other.id, Some(1)).await.unwrap();
    assert!(matches!(registry.delete_definition(&other.id, None).await, Err(RegistryError::NotFound)));
    assert_eq!(registry.definitions(ALL).await.unwrap().total, 1);
}

/// A subscription always refers to a definition that exists.
pub async fn subscriptions_are_made_changed_and_removed(harness: &impl HubHarness) {
    let registry = harness.open(options()).await.registry;
    let orphan = registry.create_subscription(&new_id(), subscription("unknown", "billing")).await;
    assert!(matches!(orphan, Err(RegistryError::UnknownDefinition)));
    let placed = registry.create_definition(definition("placed")).await.unwrap();
    let paid = registry.create_definition(definition("paid")).await.unwrap();
    let made = create(&registry, subscription(&placed.id, "billing")).await;
    assert_eq!((made.version, &made.fields), (1, &subscription(&placed.id, "billing")));
    assert_eq!(registry.subscription(&made.id).await.unwrap(), Some(made.clone()));
    create(&registry, subscription(&paid.id, "billing")).await;
    let third = create(&registry, subscription(&paid.id, "audit")).await;
    assert!(matches!(registry.delete_definition(&placed.id, None).await, Err(RegistryError::InUse)));

    let count = async |filter: SubscriptionFilter| registry.subscriptions(&filter, ALL).await.unwrap().total;
    assert_eq!(count(SubscriptionFilter::default()).await, 3);
    let billing = || Some("billing".to_owned());
    assert_eq!(count(SubscriptionFilter { subscriber_id: billing(), definition_id: None }).await, 2);
    assert_eq!(count(SubscriptionFilter { subscriber_id: billing(), definition_id: Some(paid.id.clone()) }).await, 1);

    let mut fields = subscription(&paid.id, "billing");
    fields.max_retry = None;
    fields.tenant_id = Some("acme".to_owned());
    fields.filter = filter();
    let changed = registry.update_subscription(&made.id, fields.clone(), Some(1)).await.unwrap();
    assert_eq!((changed.version, &changed.fields), (2, &fields));
    assert_eq!(registry.subscription(&made.id).await.unwrap(), Some(changed));
    let stale = registry.update_subscription(&made.id, fields.clone(), Some(1)).await;
    assert!(matches!(stale, Err(RegistryError::Stale { .. })));
    fields.filter = Filter::default();
    let changed = registry.update_subscription(&made.id, fields.clone(), Some(2)).await.unwrap();
    assert_eq!(changed.fields, fields, "an update without a filter removes it");
    fields.definition_id = "unknown".to_owned();
    let orphan = registry.update_subscription(&made.id, fields, None).await;
    assert!(matches!(orphan, Err(RegistryError::UnknownDefinition)));
    registry.delete_subscription(&third.id, None).await.unwrap();
    assert!(matches!(registry.delete_subscription(&third.id, None).await, Err(RegistryError::NotFound)));
    registry.delete_definition(&placed.id, None).await.unwrap();
}

/// A refused change does not move the version.
pub async fn every_change_and_nothing_else_moves_the_version(harness: &impl HubHarness) {
    let registry = harness.open(options()).await.registry;
    assert_eq!(registry.load_active().await.unwrap(), (0, Vec::new()));
    let definition = registry.create_definition(definition("placed")).await.unwrap();
    let subscription_of = || subscription(&definition.id, "billing");
    let made = create(&registry, subscription_of()).await;
    assert_eq!(registry.version().await.unwrap(), 2);
    assert_eq!(registry.load_active().await.unwrap(), (2, vec![(definition.clone(), made.clone())]));
    registry.create_definition(definition.fields.clone()).await.unwrap_err();
    registry.delete_subscription("unknown", None).await.unwrap_err();
    assert_eq!(registry.version().await.unwrap(), 2, "a refusal changes nothing");
    let mut inactive = subscription_of();
    inactive.active = false;
    registry.update_subscription(&made.id, inactive, None).await.unwrap();
    assert_eq!(registry.load_active().await.unwrap(), (3, Vec::new()));
}

fn new_id() -> String {
    uuid::Uuid::now_v7().to_string()
}

/// The same subscriber, definition, address, tenant and filter are the same subscription.
pub async fn creating_the_same_subscription_again_returns_the_existing_one(harness: &impl HubHarness) {
    let registry = harness.open(options()).await.registry;
    let placed = registry.create_definition(definition("placed")).await.unwrap();
    let first = create(&registry, subscription(&placed.id, "billing")).await;
    let version = registry.version().await.unwrap();
    let changed = SubscriptionFields { active: false, max_retry: Some(9), ..subscription(&placed.id, "billing") };
    let again = registry.create_subscription(&new_id(), changed).await.unwrap();
    assert_eq!(again, Created::Existing(first));
    assert_eq!(registry.version().await.unwrap(), version, "nothing changed");
    // Another subscriber, address, tenant or filter is another subscription.
    create(&registry, subscription(&placed.id, "audit")).await;
    let elsewhere = Bytes::from_static(b"digest of another address");
    create(&registry, SubscriptionFields { endpoint_digest: elsewhere, ..subscription(&placed.id, "billing") }).await;
    let tenant_id = Some("acme".to_owned());
    create(&registry, SubscriptionFields { tenant_id, ..subscription(&placed.id, "billing") }).await;
    let filtered = || SubscriptionFields { filter: filter(), ..subscription(&placed.id, "billing") };
    let first = create(&registry, filtered()).await;
    assert_eq!(first.fields, filtered());
    assert_eq!(registry.create_subscription(&new_id(), filtered()).await.unwrap(), Created::Existing(first));
    assert_eq!(registry.subscriptions(&SubscriptionFilter::default(), ALL).await.unwrap().total, 5);
}

/// Lists are in the order of creation. A page after an id has the entries that were created after it.
pub async fn a_page_continues_after_an_id(harness: &impl HubHarness) {
    let registry = harness.open(options()).await.registry;
    let mut made = Vec::new();
    for number in 0..5 {
        made.push(registry.create_definition(definition(&number.to_string())).await.unwrap());
    }
    let first = registry.definitions(PageRequest { after: None, page: 0, size: 3 }).await.unwrap();
    assert_eq!((&first.items[..], first.total, first.has_more), (&made[..3], 5, true));
    let after = Some(first.items[2].id.clone());
    let second = registry.definitions(PageRequest { after, page: 0, size: 3 }).await.unwrap();
    assert_eq!((&second.items[..], second.total, second.has_more), (&made[3..], 5, false));
}

/// Sealed credentials cannot be read without the key, so a new key must not be made silently.
pub async fn sealed_credentials_are_remembered(harness: &impl HubHarness) {
    let registry = harness.open(options()).await.registry;
    let placed = registry.create_definition(definition("placed")).await.unwrap();
    create(&registry, SubscriptionFields { credentials_sealed: Bytes::new(), ..subscription(&placed.id, "open") })
        .await;
    assert!(!registry.has_sealed_credentials().await.unwrap());
    let sealed = create(&registry, subscription(&placed.id, "billing")).await;
    registry.delete_subscription(&sealed.id, None).await.unwrap();
    assert!(registry.has_sealed_credentials().await.unwrap());
}
