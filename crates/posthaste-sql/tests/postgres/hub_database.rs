//! Several processes on the database of one hub.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::join_all;
use posthaste_backend_tests::servers;
use posthaste_core::Event;
use posthaste_core::hub_store::{
    Admission, Created, DefinitionFields, EventKey, HubDatabase as _, HubOptions, HubStores, Ingested, OpenError,
    Refusal, RegistryError, SubscriptionFields, SubscriptionFilter,
};
use posthaste_core::outbox;
use posthaste_sql::postgres::{HubDatabase, MIN_CONNECTIONS};

use crate::support::LEASE;

const OPTIONS: HubOptions = HubOptions { lease: LEASE, max_channels: 100, partitions: 2, is_ordered: false };

async fn process(url: &str, options: HubOptions) -> HubStores {
    let database = HubDatabase::open(url, MIN_CONNECTIONS).await.unwrap();
    database.migrate().await.unwrap();
    database.open(options).await.unwrap()
}

/// A fresh database, as this many processes see it that start at once.
async fn processes(count: usize, options: HubOptions) -> (String, Vec<HubStores>) {
    let url = servers::postgres().await;
    let stores = join_all((0..count).map(|_| process(&url, options.clone()))).await;
    (url, stores)
}

fn event(id: &str, event_type: &str, payload: &str) -> Arc<Event> {
    Arc::new(Event::builder(event_type).id(id.to_owned()).text(payload.to_owned()).build().unwrap())
}

/// The results of all processes that ingest at once.
async fn ingest(stores: &[HubStores], atomic: bool, events: impl Fn(usize) -> Vec<Arc<Event>>) -> Vec<Vec<Admission>> {
    let ingest = |(number, stores): (usize, &HubStores)| {
        let (channels, events) = (stores.channels.clone(), events(number));
        tokio::spawn(async move { channels.ingest(events, atomic).await.unwrap() })
    };
    let results = join_all(stores.iter().enumerate().map(ingest)).await;
    results.into_iter().map(Result::unwrap).collect()
}

fn count(results: &[Vec<Admission>], wanted: Ingested) -> usize {
    results.iter().flatten().filter(|admission| **admission == Admission::Ingested(wanted)).count()
}

/// The batches have the same events in different orders.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn processes_that_ingest_the_same_events_at_once_store_each_once() {
    let (_url, stores) = processes(3, OPTIONS).await;
    for round in 0..10 {
        for atomic in [false, true] {
            let batch = |number: usize| -> Vec<Arc<Event>> {
                let id = |place: usize| event(&format!("{atomic}-{round}-{}", (place + number * 40) % 100), "t", "{}");
                (0..100).map(id).collect()
            };
            let results = ingest(&stores, atomic, batch).await;
            assert_eq!((count(&results, Ingested::Stored), count(&results, Ingested::Known)), (100, 200));
        }
    }
}

/// One of the batches is stored whole, and the others not at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn atomic_batches_that_conflict_with_each_other_are_stored_whole_or_not_at_all() {
    let (_url, stores) = processes(3, OPTIONS).await;
    for round in 0..20 {
        let batch = |number: usize| {
            let own = event(&format!("{round}-own-{number}"), &format!("type-{round}-{number}"), "{}");
            vec![own, event(&format!("{round}-shared"), "shared", &number.to_string())]
        };
        let results = ingest(&stores, true, batch).await;
        assert_eq!((count(&results, Ingested::Stored), count(&results, Ingested::Withheld)), (2, 2), "{results:?}");
        assert_eq!(count(&results, Ingested::Conflict), 2, "{results:?}");
        let mut owned = stores[0].channels.load().await.unwrap();
        owned.retain(|channel| channel.event_type.starts_with(&format!("type-{round}-")));
        assert_eq!(owned.len(), 1, "a type without a stored event owns no topic: {owned:?}");
    }
}

/// Types that differ only in `.` and `_`, of different processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_topic_gets_one_owner_when_processes_ingest_new_types_at_once() {
    let (_url, stores) = processes(2, OPTIONS).await;
    for round in 0..20 {
        let name = |number: usize| format!("order{}placed{round}", if number == 0 { "." } else { "_" });
        let results = ingest(&stores, false, |number| vec![event(&name(number), &name(number), "{}")]).await;
        let owner = results.iter().position(|result| result[0] == Admission::Ingested(Ingested::Stored)).unwrap();
        let taken = Refusal::TopicTaken { owner: name(owner) };
        assert_eq!(results[1 - owner], [Admission::Refused(taken)]);
    }
    let same = ingest(&stores, false, |number| vec![event(&format!("same-{number}"), "same", "{}")]).await;
    assert_eq!(count(&same, Ingested::Stored), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn processes_together_record_no_more_channels_than_the_limit() {
    let (_url, stores) = processes(4, HubOptions { max_channels: 5, ..OPTIONS }).await;
    let results = ingest(&stores, false, |number| {
        (0..5).map(|place| event(&format!("{number}-{place}"), &format!("type-{number}-{place}"), "{}")).collect()
    })
    .await;
    assert_eq!(count(&results, Ingested::Stored), 5);
    assert_eq!(stores[0].channels.load().await.unwrap().len(), 5);
}

fn definition() -> DefinitionFields {
    let any = || "*".to_owned();
    let key = EventKey {
        source_service: any(),
        event_type: "order.placed".to_owned(),
        resource_type: any(),
        operation_type: any(),
    };
    DefinitionFields { key, description: None }
}

fn subscription(definition_id: &str, digest: &'static str) -> SubscriptionFields {
    SubscriptionFields {
        subscriber_id: "billing".to_owned(),
        definition_id: definition_id.to_owned(),
        endpoint: "https://example.com/hook".to_owned(),
        endpoint_digest: Bytes::from_static(digest.as_bytes()),
        payload_type: "PAYLOAD_TYPE_JSON".to_owned(),
        auth_type: "NONE".to_owned(),
        credentials_sealed: Bytes::from_static(b"sealed"),
        header_names: Vec::new(),
        timeout: None,
        max_retry: None,
        tenant_id: None,
        filter: Default::default(),
        active: true,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn processes_that_register_the_same_at_once_register_it_once() {
    let (_url, stores) = processes(4, OPTIONS).await;
    let create = |stores: &HubStores| {
        let registry = stores.registry.clone();
        tokio::spawn(async move { registry.create_definition(definition()).await })
    };
    let made: Vec<_> = join_all(stores.iter().map(create)).await.into_iter().map(Result::unwrap).collect();
    let refused = made.iter().filter(|made| matches!(made, Err(RegistryError::Duplicate))).count();
    assert_eq!(refused, 3, "{made:?}");
    let definition = made.into_iter().find_map(Result::ok).unwrap();

    let subscribe = |stores: &HubStores| {
        let (registry, fields) = (stores.registry.clone(), subscription(&definition.id, "digest"));
        tokio::spawn(async move { registry.create_subscription(&new_id(), fields).await.unwrap() })
    };
    let made: Vec<_> = join_all(stores.iter().map(subscribe)).await.into_iter().map(Result::unwrap).collect();
    let ids: HashSet<&str> = made
        .iter()
        .map(|made| match made {
            Created::New(subscription) | Created::Existing(subscription) => subscription.id.as_str(),
        })
        .collect();
    assert_eq!((ids.len(), made.iter().filter(|made| matches!(made, Created::New(_))).count()), (1, 1));
    for stores in &stores {
        assert_eq!(stores.registry.version().await.unwrap(), 2);
        assert_eq!(stores.registry.load_active().await.unwrap().1.len(), 1);
    }

    // The definition is deleted while others subscribe to it: no subscription is left without it.
    stores[0].registry.delete_subscription(ids.iter().next().unwrap(), None).await.unwrap();
    let (deleting, subscribing) = (stores[0].registry.clone(), stores[1].registry.clone());
    let (id, fields) = (definition.id.clone(), subscription(&definition.id, "other"));
    let (deleted, subscribed) = tokio::join!(
        tokio::spawn(async move { deleting.delete_definition(&id, None).await }),
        tokio::spawn(async move { subscribing.create_subscription(&new_id(), fields).await }),
    );
    match (deleted.unwrap(), subscribed.unwrap()) {
        (Ok(()), Err(RegistryError::UnknownDefinition)) | (Err(RegistryError::InUse), Ok(_)) => {}
        (deleted, subscribed) => panic!("{deleted:?} {subscribed:?}"),
    }
    let page = stores[0].registry.subscriptions(&SubscriptionFilter::default(), Default::default()).await.unwrap();
    assert_eq!(page.total, stores[0].registry.definitions(Default::default()).await.unwrap().total);
}

fn new_id() -> String {
    uuid::Uuid::now_v7().to_string()
}

#[tokio::test]
async fn a_process_with_another_lease_is_refused() {
    let (url, _stores) = processes(1, OPTIONS).await;
    let database = HubDatabase::open(&url, MIN_CONNECTIONS).await.unwrap();
    let refused = database.open(HubOptions { lease: LEASE / 2, ..OPTIONS }).await.err().unwrap();
    assert!(matches!(refused, OpenError::Outbox(outbox::OpenError::OtherLease { .. })), "{refused}");
}

#[tokio::test]
async fn a_write_is_checked_and_leaves_nothing() {
    let url = servers::postgres().await;
    let database = HubDatabase::open(&url, MIN_CONNECTIONS).await.unwrap();
    assert_eq!(database.migrations().schema().await.unwrap().found, None);
    database.migrate().await.unwrap();
    let schema = database.migrations().schema().await.unwrap();
    assert_eq!(schema.found, Some(schema.known));
    database.check_write(100_000).await.unwrap();
    let left = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM write_probe").fetch_one(database.database().pool());
    assert_eq!(left.await.unwrap(), 0);
}

#[tokio::test]
async fn an_unreachable_database_is_named_without_its_password() {
    let url = servers::postgres().await;
    let (server, _) = url.rsplit_once('/').unwrap();
    let missing = format!("{server}/missing").replace("postgres@", "postgres:hunter2@");
    let error = HubDatabase::open(&missing, MIN_CONNECTIONS).await.err().unwrap();
    let OpenError::Unreachable { problem, source } = error else { panic!("{error}") };
    assert!(problem.contains("/missing cannot be used: create it"), "{problem}");
    assert!(!format!("{problem} {source}").contains("hunter2"), "{problem} {source}");
    assert_eq!(HubDatabase::name("postgres://me:hunter2@host/hub"), Some("postgres://host:5432/hub".to_owned()));
}
