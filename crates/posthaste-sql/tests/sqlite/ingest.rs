//! The hub's door: events that may come again.

use bytes::Bytes;
use posthaste_core::outbox::{Mode, OperatorStore, OutboxStatus};
use posthaste_core::{Event, Source};
use posthaste_sql::sqlite::Ingested::{Conflict, Known, Stored, Withheld};

use crate::support::{File, event};

#[tokio::test]
async fn the_same_event_again_is_known_and_another_with_its_id_is_a_conflict() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::SingleNode).await;
    let first = outbox.store().ingest(vec![event("1", "t", "{}"), event("2", "t", "{}")]).await.unwrap();
    assert_eq!(first, [Stored, Stored]);
    let bytes = Event::builder("t").id("1".to_owned()).bytes(Bytes::from_static(b"{}")).build().unwrap();
    let twin = event("4", "t", "{}");
    let batch = vec![
        event("1", "t", "{}"),
        event("2", "t", "{ }"),
        event("1", "other", "{}"),
        bytes.into(),
        event("3", "t", "{}"),
        event("3", "t", "{}"),
        event("3", "t", "[]"),
        twin.clone(),
        twin,
    ];
    let again = outbox.store().ingest(batch).await.unwrap();
    assert_eq!(again, [Known, Conflict, Conflict, Known, Stored, Known, Conflict, Stored, Known]);
    let items = outbox.dispatcher_source().claim(10).await.unwrap().items;
    let stored: Vec<_> =
        items.iter().map(|claimed| (claimed.item.event.id(), claimed.item.event.payload().as_bytes())).collect();
    assert_eq!(stored, [("1", &b"{}"[..]), ("2", b"{}"), ("3", b"{}"), ("4", b"{}")], "the first stays");
    assert!(outbox.store().ingest(Vec::new()).await.unwrap().is_empty());
}

#[tokio::test]
async fn an_atomic_batch_is_stored_whole_or_not_at_all() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::SingleNode).await;
    outbox.store().ingest(vec![event("1", "t", "{}")]).await.unwrap();
    let refused = vec![event("2", "t", "{}"), event("1", "t", "{}"), event("1", "t", "[]")];
    assert_eq!(outbox.store().ingest_atomic(refused).await.unwrap(), [Withheld, Known, Conflict]);
    let inside = vec![event("3", "t", "{}"), event("3", "t", "[]")];
    assert_eq!(outbox.store().ingest_atomic(inside).await.unwrap(), [Withheld, Conflict]);
    assert!(outbox.store().find("2").await.unwrap().is_none() && outbox.store().find("3").await.unwrap().is_none());
    let taken = vec![event("2", "t", "{}"), event("1", "t", "{}"), event("2", "t", "{}")];
    assert_eq!(outbox.store().ingest_atomic(taken).await.unwrap(), [Stored, Known, Known]);
    assert_eq!(outbox.store().find("2").await.unwrap().unwrap().status, OutboxStatus::New);
}
