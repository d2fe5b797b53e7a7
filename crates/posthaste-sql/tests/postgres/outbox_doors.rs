//! How events come into the outbox.

use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use posthaste_core::outbox::Mode;
use posthaste_core::{Event, FaultKind, Payload, Signal, Source};

use crate::support::{MODES, Postgres, event, ids};

#[tokio::test]
async fn payloads_come_back_byte_for_byte() {
    let postgres = Postgres::start().await;
    let outbox = postgres.dispatcher(Mode::MultiNode).await;
    let texts = [
        "",
        "null",
        "  { \"a\" : 1.0e2 }\r\n",
        "\u{feff}😀 é \u{301} \u{202e}",
        "{\"a\":1,\"a\":2}",
        "\\x00 'quoted' \"double\" `tick` ? $1 :name --",
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
    let now = Utc::now().trunc_subsecs(6);
    let full = full.header("b", "ü\"\\\0").header("a", "").header("b", "again").occurred_at(now);
    events.push(full.text("{}".to_owned()).build().unwrap());
    let mut tx = postgres.pool.begin().await.unwrap();
    let written = outbox.write_all(&mut tx, &events).await.unwrap();
    tx.commit().await.unwrap();
    let items = outbox.dispatcher_source().claim(100).await.unwrap().items;
    assert_eq!(items.iter().map(|claimed| claimed.item.seq).collect::<Vec<_>>(), written);
    assert_eq!(*items[events.len() - 1].item.event, events[events.len() - 1], "with all its fields");
    for (claimed, written) in items.iter().zip(&events) {
        let read = &claimed.item.event;
        assert_eq!((read.id(), read.payload(), read.headers()), (written.id(), written.payload(), written.headers()));
        assert!((read.occurred_at() - written.occurred_at()).abs() < TimeDelta::microseconds(1));
        assert_eq!(matches!(claimed.item.event.payload(), Payload::Bytes(_)), written.content_type().is_some());
        assert_eq!(claimed.bytes, written.weight());
    }
}

#[tokio::test]
async fn a_text_with_the_one_character_that_postgres_lacks_keeps_its_bytes() {
    let postgres = Postgres::start().await;
    let outbox = postgres.dispatcher(Mode::SingleNode).await;
    postgres.write(&outbox, &[event("1", "t", "a\0b"), event("2", "t", "ab")]).await;
    let items = outbox.dispatcher_source().claim(10).await.unwrap().items;
    assert_eq!(items[0].item.event.payload(), &Payload::Bytes(Bytes::from_static(b"a\0b")));
    assert_eq!(items[1].item.event.payload(), &Payload::Text("ab".to_owned()));
    let tenant = Event::builder("t").text("{}".to_owned()).tenant_id("a\0b".to_owned()).build().unwrap();
    let mut connection = postgres.pool.acquire().await.unwrap();
    let refused = outbox.write(&mut connection, &tenant).await.unwrap_err();
    assert_eq!(refused.kind(), FaultKind::Lasting, "{}", refused.chain());
}

#[tokio::test]
async fn a_write_is_seen_after_its_commit_and_never_after_a_rollback() {
    for mode in MODES {
        let postgres = Postgres::start().await;
        let outbox = postgres.dispatcher(mode).await;
        let source = outbox.dispatcher_source();
        let mut tx = postgres.pool.begin().await.unwrap();
        outbox.write(&mut tx, &event("rolled-back", "t", "{}")).await.unwrap();
        assert!(source.claim(10).await.unwrap().items.is_empty(), "not committed");
        tx.rollback().await.unwrap();
        assert!(source.claim(10).await.unwrap().items.is_empty());
        let mut tx = postgres.pool.begin().await.unwrap();
        outbox.write(&mut tx, &event("committed", "t", "{}")).await.unwrap();
        assert_eq!(source.wakeup().signalled().await, Signal::Soon);
        tx.commit().await.unwrap();
        outbox.committed();
        assert_eq!(source.wakeup().signalled().await, Signal::Now);
        assert_eq!(ids(&source.claim(10).await.unwrap().items), ["committed"]);
        assert!(outbox.find("rolled-back").await.unwrap().is_none());
    }
}

#[tokio::test]
async fn many_events_are_written_in_order() {
    for mode in MODES {
        let postgres = Postgres::start().await;
        let outbox = postgres.dispatcher(mode).await;
        let events: Vec<Event> =
            (0..2_500).map(|number| Event::builder("t").text(number.to_string()).build().unwrap()).collect();
        let mut tx = postgres.pool.begin().await.unwrap();
        outbox.write_all(&mut tx, &events).await.unwrap();
        assert!(outbox.write_all(&mut tx, &[]).await.unwrap().is_empty());
        tx.commit().await.unwrap();
        let source = outbox.dispatcher_source();
        let mut seen = Vec::new();
        while seen.len() < events.len() {
            let items = source.claim(400).await.unwrap().items;
            assert!(!items.is_empty());
            seen.extend(ids(&items).into_iter().map(str::to_owned));
        }
        assert_eq!(seen, events.iter().map(Event::id).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn an_id_is_written_once() {
    let postgres = Postgres::start().await;
    let outbox = postgres.dispatcher(Mode::SingleNode).await;
    postgres.write(&outbox, &[event("1", "t", "{}")]).await;
    let mut connection = postgres.pool.acquire().await.unwrap();
    let refused = outbox.write(&mut connection, &event("1", "t", "{}")).await.unwrap_err();
    assert_eq!(refused.kind(), FaultKind::Lasting);
    assert!(refused.chain().contains("event_id"), "{}", refused.chain());
}

#[tokio::test]
async fn a_delay_is_the_databases_or_the_callers() {
    let postgres = Postgres::start().await;
    let outbox = postgres.dispatcher(Mode::SingleNode).await;
    let at = Utc::now() + TimeDelta::hours(2);
    let build = |id: &str| Event::builder("t").id(id.to_owned()).text("{}".to_owned());
    let until = build("until").available_at(at).build().unwrap();
    let wait = build("for").deliver_after(Duration::from_millis(3_600_250)).build().unwrap();
    let for_ever = build("for-ever").deliver_after(Duration::MAX).build().unwrap();
    let far = build("far").available_at(DateTime::<Utc>::MAX_UTC).build().unwrap();
    let ancient = build("ancient").occurred_at(DateTime::<Utc>::MIN_UTC).build().unwrap();
    postgres.write(&outbox, &[until, wait, for_ever, far, ancient]).await;
    let until = outbox.find("until").await.unwrap().unwrap();
    assert_eq!(until.available_at.timestamp_micros(), at.timestamp_micros());
    let wait = outbox.find("for").await.unwrap().unwrap();
    assert_eq!(wait.available_at - wait.created_at, TimeDelta::milliseconds(3_600_250));
    for id in ["for-ever", "far"] {
        let row = outbox.find(id).await.unwrap().unwrap();
        assert!(row.available_at > Utc::now() + TimeDelta::days(36_000), "{id}");
    }
    assert_eq!(ids(&outbox.dispatcher_source().claim(10).await.unwrap().items), ["ancient"]);
}
