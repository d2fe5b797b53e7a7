//! The bus with the framing of the Schema Registry around every value that the hub publishes.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use posthaste_core::bus::{Bus, Consumer, PublishError, Record, Topics};
use posthaste_core::{FaultKind, StoreError, lock};
use posthaste_schema::compatibility::Level;
use posthaste_schema::{Framer, RegistryError};

use crate::envelope;
use crate::topics::TopicNames;

/// Publishes Protobuf messages with the id of their schema. A consumer gets the values as they are on the bus.
pub(crate) struct FramedBus {
    bus: Arc<dyn Bus>,
    framer: Arc<Framer>,
    topics: TopicNames,
    /// The compatibility that the configuration sets, by topic.
    levels: HashMap<Arc<str>, Level>,
    /// The topics whose compatibility is set.
    set: Mutex<HashSet<Arc<str>>>,
}

impl FramedBus {
    pub(crate) fn new(
        bus: Arc<dyn Bus>,
        framer: Arc<Framer>,
        topics: TopicNames,
        levels: HashMap<Arc<str>, Level>,
    ) -> Self {
        Self { bus, framer, topics, levels, set: Mutex::default() }
    }

    /// Frames the value of a record. Waits only for the first record of a topic.
    async fn frame(&self, record: &Record) -> Result<Bytes, PublishError> {
        let (topic, message) = (&record.topic, envelope::message_name(&self.topics, &record.topic));
        if let Some(framed) = self.framer.encode_now(topic, message, &record.value) {
            return Ok(framed);
        }
        self.set_compatibility(topic).await.map_err(refused)?;
        self.framer.encode(topic, message, &record.value).await.map_err(refused)
    }

    async fn set_compatibility(&self, topic: &Arc<str>) -> Result<(), RegistryError> {
        let Some(level) = self.levels.get(topic) else { return Ok(()) };
        if !lock(&self.set).contains(topic) {
            self.framer.registry().set_compatibility(&Framer::subject(topic), *level).await?;
            lock(&self.set).insert(topic.clone());
        }
        Ok(())
    }
}

fn refused(error: RegistryError) -> PublishError {
    match error {
        RegistryError::Unavailable { .. } => {
            PublishError::Unavailable(Arc::new(StoreError::new("register a schema", FaultKind::Transient, error)))
        }
        error => PublishError::Refused { reason: error.to_string() },
    }
}

#[async_trait]
impl Bus for FramedBus {
    async fn publish(&self, records: Vec<Record>) -> Vec<Result<(), PublishError>> {
        let mut results = Vec::with_capacity(records.len());
        let (mut framed, mut failed) = (Vec::with_capacity(records.len()), HashMap::new());
        for mut record in records {
            // One failure of the registry is enough to know that it fails for all records of a topic.
            let known: Option<&PublishError> = failed.get(&record.topic);
            let value = match known {
                Some(error) => Err(error.clone()),
                None => self.frame(&record).await,
            };
            match value {
                Ok(value) => {
                    record.value = value;
                    results.push(Ok(()));
                    framed.push(record);
                }
                Err(error) => {
                    failed.insert(record.topic, error.clone());
                    results.push(Err(error));
                }
            }
        }
        let mut published = match framed.is_empty() {
            true => Vec::new(),
            false => self.bus.publish(framed).await,
        }
        .into_iter();
        for result in results.iter_mut().filter(|result| result.is_ok()) {
            if let Some(published) = published.next() {
                *result = published;
            }
        }
        results
    }

    async fn subscribe(&self, group: &str, topics: Topics) -> Result<Box<dyn Consumer>, StoreError> {
        self.bus.subscribe(group, topics).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use posthaste_schema::{ParsedSchema, SchemaRegistry, SchemaText, framing};

    use super::*;

    /// A registry that can be away, and refuses one topic.
    #[derive(Default)]
    struct Registry {
        is_away: AtomicBool,
        levels: Mutex<Vec<(String, Level)>>,
        registered: AtomicU32,
    }

    impl Registry {
        fn answer<T>(&self, answer: T) -> Result<T, RegistryError> {
            match self.is_away.load(Ordering::Relaxed) {
                true => Err(RegistryError::Unavailable { reason: "away".to_owned() }),
                false => Ok(answer),
            }
        }
    }

    #[async_trait]
    impl SchemaRegistry for Registry {
        async fn register(&self, subject: &str, _: &SchemaText) -> Result<i32, RegistryError> {
            self.registered.fetch_add(1, Ordering::Relaxed);
            match subject {
                "p.events.bad-value" => Err(RegistryError::Incompatible { reason: "a field".to_owned() }),
                _ => self.answer(7),
            }
        }

        async fn schema(&self, _: i32) -> Result<Option<Arc<ParsedSchema>>, RegistryError> {
            self.answer(None)
        }

        async fn set_compatibility(&self, subject: &str, level: Level) -> Result<(), RegistryError> {
            lock(&self.levels).push((subject.to_owned(), level));
            self.answer(())
        }

        async fn check(&self) -> Result<(), RegistryError> {
            self.answer(())
        }
    }

    /// Remembers what is published, and refuses the second record of every publish.
    #[derive(Default)]
    struct Published(Mutex<Vec<Record>>);

    #[async_trait]
    impl Bus for Published {
        async fn publish(&self, records: Vec<Record>) -> Vec<Result<(), PublishError>> {
            let refuse = |index: usize| match index {
                1 => Err(PublishError::Refused { reason: "second".to_owned() }),
                _ => Ok(()),
            };
            let results = (0..records.len()).map(refuse).collect();
            lock(&self.0).extend(records);
            results
        }

        async fn subscribe(&self, _: &str, _: Topics) -> Result<Box<dyn Consumer>, StoreError> {
            unreachable!("the test never subscribes")
        }
    }

    fn record(topic: &str) -> Record {
        let value = Bytes::from_static(b"message");
        Record { topic: topic.into(), route: 0, key: String::new(), value, headers: Vec::new() }
    }

    struct Fixture {
        registry: Arc<Registry>,
        published: Arc<Published>,
        bus: FramedBus,
    }

    fn fixture() -> Fixture {
        let (registry, published) = (Arc::new(Registry::default()), Arc::new(Published::default()));
        let framer = Arc::new(Framer::new(registry.clone(), envelope::schema()).unwrap());
        let levels = HashMap::from([("p.events.a".into(), Level::Full)]);
        let bus = FramedBus::new(published.clone(), framer, TopicNames::new("p"), levels);
        Fixture { registry, published, bus }
    }

    #[tokio::test]
    async fn each_record_gets_its_own_result_in_order() {
        let Fixture { published, bus, .. } = fixture();
        let topics = ["p.events.a", "p.events.bad", "p.outbox.organization", "p.events.bad", "p.events.a"];
        let results = bus.publish(topics.map(record).into()).await;
        let refused = |result: &Result<(), PublishError>| match result {
            Ok(()) => String::new(),
            Err(error) => error.to_string(),
        };
        let results: Vec<String> = results.iter().map(refused).collect();
        assert!(results[0].is_empty() && results[4].is_empty(), "{results:?}");
        assert!(results[1].contains("not compatible") && results[3].contains("not compatible"), "{results:?}");
        assert!(results[2].contains("second"), "{results:?}");
        let frames: Vec<_> = lock(&published.0).iter().map(|record| framing::decode(&record.value).unwrap()).collect();
        assert!(frames.iter().all(|frame| frame.schema_id == 7 && frame.message == "message"));
        assert_eq!(frames.iter().map(|frame| frame.indexes[0]).collect::<Vec<_>>(), [0, 2, 0]);
    }

    #[tokio::test]
    async fn a_registry_that_is_away_is_an_outage_and_is_asked_once_for_a_batch() {
        let Fixture { registry, published, bus } = fixture();
        registry.is_away.store(true, Ordering::Relaxed);
        let results = bus.publish(vec![record("p.events.b"), record("p.events.b")]).await;
        assert!(results.iter().all(|result| matches!(result, Err(PublishError::Unavailable(_)))), "{results:?}");
        assert_eq!((registry.registered.load(Ordering::Relaxed), lock(&published.0).len()), (1, 0));
        registry.is_away.store(false, Ordering::Relaxed);
        assert!(bus.publish(vec![record("p.events.b")]).await[0].is_ok());
    }

    #[tokio::test]
    async fn the_configured_compatibility_is_set_before_the_schema_is_registered() {
        let Fixture { registry, bus, .. } = fixture();
        registry.is_away.store(true, Ordering::Relaxed);
        assert!(bus.publish(vec![record("p.events.a")]).await[0].is_err());
        assert_eq!(registry.registered.load(Ordering::Relaxed), 0, "it waits for the compatibility");
        registry.is_away.store(false, Ordering::Relaxed);
        for topic in ["p.events.a", "p.events.a", "p.events.b"] {
            assert!(bus.publish(vec![record(topic)]).await[0].is_ok());
        }
        let set = ("p.events.a-value".to_owned(), Level::Full);
        assert_eq!(*lock(&registry.levels), [set.clone(), set]);
    }
}
