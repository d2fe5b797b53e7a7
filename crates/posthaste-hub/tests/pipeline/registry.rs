//! A Schema Registry that is away or refuses the schema.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use posthaste_hub::PartStatus;
use posthaste_schema::compatibility::Level;
use posthaste_schema::{Imports, ParsedSchema, RegistryError, SchemaRegistry, SchemaText};

use crate::support::{Subscriber, ask, open_database, open_with_registry, publish, subscribe, test_settings, until};

#[derive(Clone, Copy, Default, PartialEq)]
enum State {
    #[default]
    Up,
    Away,
    /// It answers, but registers nothing.
    ReadOnly,
    Incompatible,
}

/// A registry with one schema, which does what the test says.
#[derive(Default)]
struct Registry {
    state: Mutex<State>,
    schema: Mutex<Option<Arc<ParsedSchema>>>,
}

impl Registry {
    fn set(&self, state: State) {
        *self.state.lock().unwrap() = state;
    }

    fn answer(&self) -> Result<(), RegistryError> {
        match *self.state.lock().unwrap() {
            State::Away => Err(RegistryError::Unavailable { reason: "connection refused".to_owned() }),
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl SchemaRegistry for Registry {
    async fn register(&self, _: &str, schema: &SchemaText) -> Result<i32, RegistryError> {
        self.answer()?;
        match *self.state.lock().unwrap() {
            State::Incompatible => {
                return Err(RegistryError::Incompatible { reason: "a field was removed".to_owned() });
            }
            State::ReadOnly => return Err(RegistryError::Unavailable { reason: "it is in read-only mode".to_owned() }),
            _ => {}
        }
        let parsed = ParsedSchema::parse(schema.clone(), &Imports::new()).unwrap();
        *self.schema.lock().unwrap() = Some(Arc::new(parsed));
        Ok(1)
    }

    async fn schema(&self, _: i32) -> Result<Option<Arc<ParsedSchema>>, RegistryError> {
        self.answer()?;
        Ok(self.schema.lock().unwrap().clone())
    }

    async fn set_compatibility(&self, _: &str, _: Level) -> Result<(), RegistryError> {
        self.answer()
    }

    async fn check(&self) -> Result<(), RegistryError> {
        self.answer()
    }
}

const EVENT: &str = r#"{"eventType":"order.placed","sourceService":"shop","payload":{"n":1}}"#;

#[tokio::test(flavor = "multi_thread")]
async fn events_wait_while_the_registry_is_away() {
    let (registry, folder) = (Arc::new(Registry::default()), tempfile::tempdir().unwrap());
    registry.set(State::Away);
    let database = open_database(folder.path()).await;
    let hub = open_with_registry(folder.path(), database, Some(registry.clone()), test_settings()).await;
    let subscriber = Subscriber::default();
    let address = subscriber.start().await;
    subscribe(&hub, "order.placed", "billing", &format!("http://{address}/hook"), None).await;
    let id = publish(&hub, EVENT).await;
    until("the registry is degraded", async || {
        let readiness = hub.readiness().await;
        assert!(readiness.is_ready(), "{readiness:?}");
        matches!(&readiness.parts["registry"], PartStatus::Degraded(why) if why.contains("refused")).then_some(())
    })
    .await;
    let outbox = async || hub.trace(&id).await.unwrap().unwrap().outbox.unwrap();
    assert!(!outbox().await.exhausted && subscriber.received().is_empty());
    registry.set(State::Up);
    subscriber.wait_for(1).await;
    until("everything is ready", async || {
        let readiness = hub.readiness().await;
        (readiness.parts["registry"] == PartStatus::Ready).then_some(())
    })
    .await;
    let quarantined: i64 = ask(folder.path(), "SELECT count(*) FROM quarantined_record").await;
    assert_eq!(quarantined, 0, "an outage is not the fault of a record");
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_answers_but_registers_nothing_degrades_the_channels_that_wait_for_it() {
    let (registry, folder) = (Arc::new(Registry::default()), tempfile::tempdir().unwrap());
    registry.set(State::ReadOnly);
    let database = open_database(folder.path()).await;
    let mut settings = test_settings();
    settings.outbox.lease = Duration::from_secs(2);
    let hub = open_with_registry(folder.path(), database, Some(registry.clone()), settings).await;
    publish(&hub, EVENT).await;
    const CHANNEL: &str = "channel:order.placed";
    let why = until("the channel is degraded", async || {
        let readiness = hub.readiness().await;
        assert!(readiness.is_ready(), "{readiness:?}");
        match readiness.parts.get(CHANNEL)? {
            PartStatus::Degraded(why) => Some(why.clone()),
            _ => None,
        }
    })
    .await;
    assert!(why.contains("read-only mode"), "{why}");
    registry.set(State::Up);
    until("the channel is ready", async || (!hub.readiness().await.parts.contains_key(CHANNEL)).then_some(())).await;
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_an_incompatible_schema_are_dead_and_say_why() {
    let (registry, folder) = (Arc::new(Registry::default()), tempfile::tempdir().unwrap());
    registry.set(State::Incompatible);
    let database = open_database(folder.path()).await;
    let hub = open_with_registry(folder.path(), database, Some(registry), test_settings()).await;
    let id = publish(&hub, EVENT).await;
    let outbox = until("the event is dead", async || {
        let outbox = hub.trace(&id).await.unwrap()?.outbox?;
        outbox.exhausted.then_some(outbox)
    })
    .await;
    let why = format!("{outbox:?}");
    assert!(why.contains("not compatible") && why.contains("a field was removed"), "{why}");
    hub.stop().await;
}
