use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use posthaste_core::lock;
use tokio::sync::Semaphore;

use super::*;
use crate::compatibility::Level;

const TEXT: &str = "syntax = \"proto3\"; package p; message A { string a = 1; message B {} } message C {}";

/// A registry that answers when the test lets it.
struct Slow {
    permits: Semaphore,
    is_down: AtomicBool,
    registrations: AtomicUsize,
    look_ups: AtomicUsize,
    subjects: Mutex<Vec<String>>,
}

impl Slow {
    fn new(permits: usize) -> Arc<Self> {
        Arc::new(Self {
            permits: Semaphore::new(permits),
            is_down: AtomicBool::new(false),
            registrations: AtomicUsize::new(0),
            look_ups: AtomicUsize::new(0),
            subjects: Mutex::default(),
        })
    }

    async fn wait(&self) -> Result<(), RegistryError> {
        self.permits.acquire().await.unwrap().forget();
        match self.is_down.load(Ordering::Relaxed) {
            true => Err(RegistryError::unavailable("down")),
            false => Ok(()),
        }
    }
}

#[async_trait]
impl SchemaRegistry for Slow {
    async fn register(&self, subject: &str, _: &SchemaText) -> Result<i32, RegistryError> {
        self.registrations.fetch_add(1, Ordering::Relaxed);
        self.wait().await?;
        lock(&self.subjects).push(subject.to_owned());
        Ok(7)
    }

    async fn schema(&self, id: i32) -> Result<Option<Arc<ParsedSchema>>, RegistryError> {
        self.look_ups.fetch_add(1, Ordering::Relaxed);
        self.wait().await?;
        match id {
            7 => Ok(Some(Arc::new(ParsedSchema::parse(text(), &Imports::new()).unwrap()))),
            8 => Err(RegistryError::Refused { reason: "it is an Avro schema".to_owned() }),
            _ => Ok(None),
        }
    }

    async fn set_compatibility(&self, _: &str, _: Level) -> Result<(), RegistryError> {
        Ok(())
    }

    async fn check(&self) -> Result<(), RegistryError> {
        Ok(())
    }
}

fn text() -> SchemaText {
    SchemaText { text: TEXT.to_owned(), references: Vec::new() }
}

fn framer(registry: &Arc<Slow>) -> Arc<Framer> {
    Arc::new(Framer::new(registry.clone(), text()).unwrap())
}

#[tokio::test]
async fn writers_of_one_topic_share_one_registration() {
    let registry = Slow::new(0);
    let framer = framer(&registry);
    let encode = |framer: Arc<Framer>| async move { framer.encode("orders", "p.A", b"m").await };
    let writers: Vec<_> = (0..10).map(|_| tokio::spawn(encode(framer.clone()))).collect();
    while registry.registrations.load(Ordering::Relaxed) == 0 {
        tokio::task::yield_now().await;
    }
    assert!(framer.encode_now("orders", "p.A", b"m").is_none());
    registry.permits.add_permits(1);
    for writer in writers {
        assert_eq!(writer.await.unwrap().unwrap(), &[0, 0, 0, 0, 7, 0, b'm'][..]);
    }
    assert_eq!(registry.registrations.load(Ordering::Relaxed), 1);
    assert_eq!(*lock(&registry.subjects), ["orders-value"]);
    assert_eq!(framer.encode_now("orders", "p.C", b"m").unwrap(), &[0, 0, 0, 0, 7, 2, 2, b'm'][..]);
    assert_eq!(framer.encode_now("orders", "p.A.B", b"").unwrap(), &[0, 0, 0, 0, 7, 4, 0, 0][..]);
    assert!(framer.encode_now("payments", "p.A", b"m").is_none(), "another topic has another subject");
}

#[tokio::test]
async fn a_failed_registration_is_shared_and_tried_again_later() {
    let registry = Slow::new(0);
    let framer = framer(&registry);
    registry.is_down.store(true, Ordering::Relaxed);
    let mut one = Box::pin(framer.encode("orders", "p.A", b"m"));
    let mut two = Box::pin(framer.encode("orders", "p.A", b"m"));
    assert!(futures_util::poll!(&mut one).is_pending() && futures_util::poll!(&mut two).is_pending());
    registry.permits.add_permits(1);
    let (one, two) = (one.await, two.await);
    assert_eq!(one, Err(RegistryError::unavailable("down")));
    assert_eq!((two, registry.registrations.load(Ordering::Relaxed)), (one, 1));
    registry.is_down.store(false, Ordering::Relaxed);
    registry.permits.add_permits(1);
    framer.encode("orders", "p.A", b"m").await.unwrap();
    let unknown = framer.encode("orders", "p.Unknown", b"m").await;
    assert!(matches!(unknown, Err(RegistryError::Refused { .. })), "{unknown:?}");
}

#[tokio::test]
async fn a_cancelled_writer_does_not_keep_others_from_registering() {
    let registry = Slow::new(0);
    let framer = framer(&registry);
    let mut first = Box::pin(framer.encode("orders", "p.A", b"m"));
    assert!(futures_util::poll!(&mut first).is_pending());
    drop(first);
    registry.permits.add_permits(1);
    framer.encode("orders", "p.A", b"m").await.unwrap();
}

fn value(id: u8, indexes: &[u8]) -> Bytes {
    [&[0, 0, 0, 0, id], indexes, b"m"].concat().into()
}

#[tokio::test]
async fn a_known_schema_is_not_looked_up_again() {
    let registry = Slow::new(1);
    let framer = framer(&registry);
    assert!(framer.decode_now(&value(7, &[0]), "p.A").is_none());
    assert_eq!(framer.decode(&value(7, &[0]), "p.A").await.unwrap(), "m");
    assert_eq!(framer.decode(&value(7, &[2, 2]), "p.C").await.unwrap(), "m");
    assert_eq!(framer.decode_now(&value(7, &[4, 0, 0]), "p.A.B").unwrap().unwrap(), "m");
    assert_eq!(registry.look_ups.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn poison_and_outages_are_told_apart() {
    let registry = Slow::new(100);
    let framer = framer(&registry);
    let poison = [
        (Bytes::new(), "empty"),
        (Bytes::from_static(b"{}"), "not framed"),
        (value(9, &[0]), "no schema 9"),
        (value(8, &[0]), "Avro"),
        (value(7, &[2, 2]), "a p.C and not a p.A"),
        (value(7, &[2, 20]), "no message [10]"),
    ];
    for (value, reason) in poison {
        let error = framer.decode(&value, "p.A").await.unwrap_err();
        assert!(matches!(&error, DecodeError::Poison(text) if text.contains(reason)), "{error}");
    }
    registry.is_down.store(true, Ordering::Relaxed);
    let error = framer.decode(&value(10, &[0]), "p.A").await.unwrap_err();
    assert!(matches!(error, DecodeError::Outage(_)), "{error}");
    assert!(error.to_string().contains("failed to look up schema 10"), "{error}");
}
