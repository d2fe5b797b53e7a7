//! How events come into the outbox.

use std::time::Duration;

use bytes::Bytes;
use chrono::{TimeDelta, Utc};
use posthaste_core::outbox::{Mode, OutboxStatus};
use posthaste_core::{Delay, Event, Payload, Signal, Source};
use posthaste_sql::sqlite::Ingested::{Conflict, Known, Stored, Withheld};

use crate::support::{File, event};

#[tokio::test]
async fn payloads_come_back_byte_for_byte() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::SingleNode).await;
    let texts = [
        "",
        "null",
        "  { \"a\" : 1.0e2 }\r\n",
        "\u{feff}😀 é \u{301} \u{202e}",
        "{\"a\":1,\"a\":2}",
        "\\x00 'quoted' \"double\" `tick` ? ?1 :name --",
        "\u{1}\u{7f}\u{fffd}\u{10ffff}",
    ];
    let mut events: Vec<Event> =
        texts.iter().map(|text| Event::builder("t").text((*text).to_owned()).build().unwrap()).collect();
    for bytes in
        [Bytes::new(), Bytes::from_static(&[0, 255, 0, 254, 13, 10]), Bytes::from((0..=255).collect::<Vec<u8>>())]
    {
        events.push(Event::builder("t").bytes(bytes).content_type("application/x-test".to_owned()).build().unwrap());
    }
    let full = Event::builder("t").id("my:id-1._".to_owned()).aggregate("order", 42).tenant_id("acme".to_owned());
    let full =
        full.source_service("shop".to_owned()).resource_type("order".to_owned()).operation_type("create".to_owned());
    let full = full.header("b", "ü\"\\").header("a", "").header("b", "again").occurred_at(Utc::now());
    events.push(full.text("{}".to_owned()).build().unwrap());
    let pool = file.pool().await;
    let mut tx = pool.begin().await.unwrap();
    let written = outbox.write_all(&mut tx, &events).await.unwrap();
    tx.commit().await.unwrap();
    let items = outbox.dispatcher_source().claim(100).await.unwrap().items;
    assert_eq!(items.iter().map(|claimed| claimed.item.seq).collect::<Vec<_>>(), written);
    assert_eq!(*items[events.len() - 1].item.event, events[events.len() - 1], "with all its fields");
    for (claimed, written) in items.iter().zip(&events) {
        let read = &claimed.item.event;
        assert_eq!((read.id(), read.payload(), read.headers()), (written.id(), written.payload(), written.headers()));
        assert_eq!(read.occurred_at(), written.occurred_at());
        assert_eq!(matches!(claimed.item.event.payload(), Payload::Bytes(_)), written.content_type().is_some());
        assert_eq!(claimed.bytes, written.weight());
    }
}

#[tokio::test]
async fn a_write_is_seen_after_its_commit_and_never_after_a_rollback() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::SingleNode).await;
    let source = outbox.dispatcher_source();
    let pool = file.pool().await;
    // Claimed once before: the ownership is taken, and a claim need not write while the service's transaction is open.
    assert!(source.claim(10).await.unwrap().items.is_empty());
    let mut tx = pool.begin().await.unwrap();
    outbox.write(&mut tx, &event("rolled-back", "t", "{}")).await.unwrap();
    assert!(source.claim(10).await.unwrap().items.is_empty(), "not committed");
    tx.rollback().await.unwrap();
    assert!(source.claim(10).await.unwrap().items.is_empty());
    let mut tx = pool.begin().await.unwrap();
    outbox.write(&mut tx, &event("committed", "t", "{}")).await.unwrap();
    assert_eq!(source.wakeup().signalled().await, Signal::Soon);
    tx.commit().await.unwrap();
    outbox.committed();
    assert_eq!(source.wakeup().signalled().await, Signal::Now);
    assert_eq!(source.claim(10).await.unwrap().items[0].item.event.id(), "committed");
    assert!(outbox.find("rolled-back").await.unwrap().is_none());
}

#[tokio::test]
async fn many_events_are_written_in_order() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::SingleNode).await;
    let events: Vec<Event> =
        (0..300).map(|number| Event::builder("t").text(number.to_string()).build().unwrap()).collect();
    let pool = file.pool().await;
    let mut tx = pool.begin().await.unwrap();
    let numbers = outbox.write_all(&mut tx, &events).await.unwrap();
    assert!(numbers.is_sorted() && numbers.len() == 300);
    assert!(outbox.write_all(&mut tx, &[]).await.unwrap().is_empty());
    tx.commit().await.unwrap();
    let items = outbox.dispatcher_source().claim(1_000).await.unwrap().items;
    let order: Vec<&str> = items.iter().map(|claimed| claimed.item.event.id()).collect();
    assert_eq!(order, events.iter().map(Event::id).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_delay_is_the_databases_or_the_callers() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::SingleNode).await;
    let at = Utc::now() + TimeDelta::hours(2);
    let build = |id: &str| Event::builder("t").id(id.to_owned()).text("{}".to_owned());
    let until = build("until").available_at(at).build().unwrap();
    let wait = build("for").deliver_after(Duration::from_millis(3_600_250)).build().unwrap();
    let for_ever = build("for-ever").deliver_after(Duration::MAX).build().unwrap();
    let far = build("far").available_at(chrono::DateTime::<Utc>::MAX_UTC).build().unwrap();
    outbox.ingest(vec![until.into(), wait.into(), for_ever.into(), far.into()]).await.unwrap();
    let until = outbox.find("until").await.unwrap().unwrap();
    assert_eq!(until.available_at.timestamp_millis(), at.timestamp_millis());
    assert!(matches!(until.event.unwrap().delay(), Delay::Until(read) if read == until.available_at));
    let wait = outbox.find("for").await.unwrap().unwrap();
    let waits = wait.available_at - wait.created_at;
    assert!((waits - TimeDelta::milliseconds(3_600_250)).abs() <= TimeDelta::milliseconds(5), "{waits}");
    for id in ["for-ever", "far"] {
        let row = outbox.find(id).await.unwrap().unwrap();
        assert!(row.available_at > Utc::now() + TimeDelta::days(36_000), "{id}");
    }
}

#[tokio::test]
async fn the_same_event_again_is_known_and_another_with_its_id_is_a_conflict() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::SingleNode).await;
    let first = outbox.ingest(vec![event("1", "t", "{}"), event("2", "t", "{}")]).await.unwrap();
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
    let again = outbox.ingest(batch).await.unwrap();
    assert_eq!(again, [Known, Conflict, Conflict, Known, Stored, Known, Conflict, Stored, Known]);
    let items = outbox.dispatcher_source().claim(10).await.unwrap().items;
    let stored: Vec<_> =
        items.iter().map(|claimed| (claimed.item.event.id(), claimed.item.event.payload().as_bytes())).collect();
    assert_eq!(stored, [("1", &b"{}"[..]), ("2", b"{}"), ("3", b"{}"), ("4", b"{}")], "the first stays");
    assert!(outbox.ingest(Vec::new()).await.unwrap().is_empty());
}

#[tokio::test]
async fn an_atomic_batch_is_stored_whole_or_not_at_all() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::SingleNode).await;
    outbox.ingest(vec![event("1", "t", "{}")]).await.unwrap();
    let refused = vec![event("2", "t", "{}"), event("1", "t", "{}"), event("1", "t", "[]")];
    assert_eq!(outbox.store().ingest_atomic(refused).await.unwrap(), [Withheld, Known, Conflict]);
    let inside = vec![event("3", "t", "{}"), event("3", "t", "[]")];
    assert_eq!(outbox.store().ingest_atomic(inside).await.unwrap(), [Withheld, Conflict]);
    assert!(outbox.find("2").await.unwrap().is_none() && outbox.find("3").await.unwrap().is_none());
    let taken = vec![event("2", "t", "{}"), event("1", "t", "{}"), event("2", "t", "{}")];
    assert_eq!(outbox.store().ingest_atomic(taken).await.unwrap(), [Stored, Known, Known]);
    assert_eq!(outbox.find("2").await.unwrap().unwrap().status, OutboxStatus::New);
}
