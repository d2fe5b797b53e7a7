//! D, E: what a store keeps of an event, and what a settlement makes of it.

use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, TimeDelta, Utc};
use posthaste::{
    DatabaseKind, Event, EventBuilder, Failure, GLOBAL_AGGREGATE, Mode, OutboxRow, OutboxStatus, Payload, Pool,
    TableName,
};
use posthaste_core::outbox::{OperatorStore, Purge, Store};
use posthaste_core::{Disposition, Settled};

use crate::harness::{
    Database, HOUR, Harness, MODES, Marks, claim, dispatcher, event, events, failure, node, on_every_database,
    on_every_store, retry, row, settle, snooze, write, write_to, writer,
};

on_every_store! {
    d1_a_new_row_holds_what_was_written_and_the_databases_time,
    d3_a_large_batch_is_stored_whole_and_in_order,
    d4_a_table_may_have_another_name,
    d6_a_payload_is_kept_byte_for_byte,
    e1_done_is_recorded_once,
    e2_a_counted_retry_counts_and_waits,
    e3_dead_keeps_its_error,
    e4_a_snooze_is_new_again_and_not_counted,
    e5_what_is_finished_stays_as_it_is,
    e6_a_long_error_is_cut,
    e7_every_mode_of_every_store_can_snooze,
    e8_a_row_that_is_gone_is_no_longer_ours,
}

on_every_database! {
    d1_a_plain_insert_of_another_program_is_an_event,
    d2_no_headers_are_null_and_headers_are_a_json_object,
}

fn now_and_then(wait: Duration) -> DateTime<Utc> {
    Utc::now() + wait
}

/// The test and the database are on the same machine.
pub fn is_about(time: DateTime<Utc>, expected: DateTime<Utc>) -> bool {
    (time - expected).abs() < TimeDelta::seconds(10)
}

/// Everything that can be set, with a time that every database can keep.
fn full(payload: &str) -> EventBuilder {
    Event::text("order.placed", payload)
        .aggregate("order", 7)
        .tenant_id("acme".to_owned())
        .source_service("shop".to_owned())
        .resource_type("order".to_owned())
        .operation_type("create".to_owned())
        .content_type("application/json".to_owned())
        .header("b", "2")
        .header("a", "é \"quoted\" \\ \n")
        .occurred_at("2026-01-01T12:00:00.123456Z".parse::<DateTime<Utc>>().unwrap())
}

pub fn full_event(payload: &str) -> Event {
    full(payload).build().unwrap()
}

async fn d1_a_new_row_holds_what_was_written_and_the_databases_time<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let written = full_event("{}");
    write(&outbox, std::slice::from_ref(&written)).await;
    let stored = row(&outbox, written.id()).await;
    assert_eq!((stored.status, stored.attempts, stored.lease_losses), (OutboxStatus::New, 0, 0));
    assert_eq!((OutboxStatus::New.code(), OutboxStatus::Done.code()), (0, 1));
    assert_eq!((OutboxStatus::Retry.code(), OutboxStatus::Dead.code()), (2, 3));
    assert!(is_about(stored.created_at, Utc::now()), "not occurred_at: {}", stored.created_at);
    assert_eq!(stored.available_at, stored.created_at);
    let OutboxRow { done_at, last_error, locked_by, locked_at, .. } = stored;
    assert!(done_at.is_none() && last_error.is_none() && locked_by.is_none() && locked_at.is_none());
    assert!(stored.event.unwrap() == written);
    let delayed = Event::text("t", "{}").deliver_after(HOUR).build().unwrap();
    write(&outbox, std::slice::from_ref(&delayed)).await;
    let stored = row(&outbox, delayed.id()).await;
    assert_eq!(stored.available_at - stored.created_at, TimeDelta::hours(1), "from the database's own clock");
}

async fn d1_a_plain_insert_of_another_program_is_an_event<H: Database>(db: H) {
    let outbox = writer(&db).await;
    db.execute("INSERT INTO outbox_event (event_type, payload) VALUES ('t', '{\"by\": \"hand\"}')").await;
    let node = node(&db, Mode::SingleNode).await;
    let claimed = claim(&node, 10).await;
    let event = &claimed[0].item.event;
    assert_eq!((event.event_type(), event.aggregate_type()), ("t", GLOBAL_AGGREGATE));
    assert_eq!(event.payload(), &Payload::Text("{\"by\": \"hand\"}".to_owned()));
    let row = row(&outbox, event.id()).await;
    assert_eq!((row.status, row.attempts), (OutboxStatus::New, 0));
    assert!(is_about(row.created_at, Utc::now()) && is_about(row.available_at, Utc::now()));
}

async fn d2_no_headers_are_null_and_headers_are_a_json_object<H: Database>(db: H) {
    let outbox = writer(&db).await;
    let with = Event::text("t", "{}").header("b", "2").header("a", "1").build().unwrap();
    let (with, without) = (with.id().to_owned(), write(&outbox, &[with, event()]).await.remove(1));
    let headers = |id: String| format!("SELECT headers FROM outbox_event WHERE event_id = '{id}'");
    assert_eq!(db.text(&headers(without)).await, None);
    assert_eq!(db.text(&headers(with)).await.as_deref(), Some("{\"b\":\"2\",\"a\":\"1\"}"));
}

async fn d3_a_large_batch_is_stored_whole_and_in_order<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let available_at: DateTime<Utc> = "2100-01-01T00:00:00Z".parse().unwrap();
    let number = |number: usize| Event::text("t", "{}").header("number", number.to_string()).available_at(available_at);
    let events: Vec<Event> = (0..510).map(|at| number(at).build().unwrap()).collect();
    let mut transaction = outbox.begin().await.unwrap();
    assert!(outbox.write_all(&mut transaction, Vec::<Event>::new()).await.unwrap().is_empty());
    assert_eq!(outbox.write_all(&mut transaction, &events).await.unwrap().len(), 510);
    transaction.commit().await.unwrap();
    let mut last = i64::MIN;
    for (at, event) in events.iter().enumerate() {
        let row = row(&outbox, event.id()).await;
        assert!(row.seq > last, "row {at} is after the one before it");
        last = row.seq;
        assert_eq!(row.available_at, available_at);
        assert_eq!(row.event.unwrap().header("number"), Some(at.to_string().as_str()));
    }
}

async fn d4_a_table_may_have_another_name<H: Harness>(db: H) {
    for name in ["_orders2", "Outbox"] {
        let builder = posthaste::Outbox::new(db.pool().await).mode(Mode::WriterOnly).table(name);
        let outbox = builder.start().await.unwrap();
        assert_eq!(outbox.table().store().table().as_str(), name);
        let ids = write(&outbox, &events(1)).await;
        assert!(outbox.find(&ids[0]).await.unwrap().is_some());
        assert!(writer(&db).await.find(&ids[0]).await.unwrap().is_none(), "not in the other table");
    }
    assert_eq!(TableName::default().as_str(), "outbox_event");
    for bad in ["", "1x", "a b", "a;drop", "a\"b", "a.b", "a-b", "é"] {
        assert!(TableName::new(bad).is_err(), "{bad}");
        let refused = posthaste::Outbox::new(db.pool().await).mode(Mode::WriterOnly).table(bad).start().await;
        assert!(matches!(refused.err(), Some(posthaste::StartError::Table(_))));
    }
}

#[test]
fn d5_a_url_tells_the_kind_of_database() {
    for (url, kind) in [
        ("postgres://h/d", DatabaseKind::Postgres),
        ("POSTGRESQL://h/d", DatabaseKind::Postgres),
        ("mysql://h/d", DatabaseKind::MySql),
        ("MariaDB://h/d", DatabaseKind::MySql),
        ("tidb://h/d", DatabaseKind::MySql),
        ("sqlite://file.db", DatabaseKind::Sqlite),
    ] {
        assert_eq!(DatabaseKind::of_url(url), Ok(kind), "{url}");
    }
    for url in ["", "oracle://h", "post", "postgresx://h", "user:secret@h"] {
        let error = DatabaseKind::of_url(url).unwrap_err().to_string();
        assert!(["postgres://", "mysql://", "sqlite:"].iter().all(|known| error.contains(known)), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }
}

const TEXTS: [&str; 10] = [
    "",
    "{}",
    "null",
    "  { \"a\" : 1.0e2 }\r\n",
    "{ \"b\" : 1,\n\t\"a\":1.0,\"a\":2 }",
    "\u{feff}😀 é \u{301} \u{202e}",
    "no JSON \\ ' \" ; -- \u{1f600} é",
    "\\x00 'quoted' \"double\" `tick` ? ?1 $1 :name --",
    "\u{1}\u{7f}\u{fffd}\u{10ffff}",
    "a\0b",
];

/// Awkward texts, awkward bytes, and last an event with all its fields.
fn awkward() -> Vec<Event> {
    let texts = TEXTS.map(|text| Event::text("t", text));
    let all_bytes: Vec<u8> = (0..=255).collect();
    let bytes = [&[][..], &[0, 255, 0, 254, 13, 10], &all_bytes];
    let bytes = bytes.map(|bytes| Event::builder("t").bytes(Bytes::copy_from_slice(bytes)));
    let full = full("{}").id("my:id-1._".to_owned()).header("b", "ü\"\\\0").header("c", "").header("b", "again");
    texts.into_iter().chain(bytes).chain([full]).map(|event| event.build().unwrap()).collect()
}

async fn d6_a_payload_is_kept_byte_for_byte<H: Harness>(db: H) {
    drop(db);
    for mode in [Mode::SingleNode, Mode::MultiNode] {
        let db = H::start().await;
        let (outbox, table) = (writer(&db).await, dispatcher(&db, mode).await);
        let events = awkward();
        let rows = write_to(&table, &events).await;
        let items = claim(&table.dispatcher_source(), 100).await;
        assert_eq!(items.iter().map(|claimed| claimed.item.seq).collect::<Vec<_>>(), rows);
        for (claimed, written) in items.iter().zip(&events) {
            for read in [&claimed.item.event, &row(&outbox, written.id()).await.event.unwrap().into()] {
                assert_eq!((read.id(), read.headers()), (written.id(), written.headers()));
                assert_eq!(read.payload(), written.payload(), "text stays text, and bytes stay bytes");
                assert!((read.occurred_at() - written.occurred_at()).abs() < TimeDelta::microseconds(1));
            }
            assert_eq!(claimed.bytes, written.weight());
        }
        assert!(*items[events.len() - 1].item.event == events[events.len() - 1], "with all its fields");
    }
}

async fn e1_done_is_recorded_once<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids = write(&outbox, &events(1)).await;
    let node = node(&db, Mode::MultiNode).await;
    let claimed = claim(&node, 1).await;
    assert_eq!(settle(&node, &claimed[0], Disposition::Done).await, Settled::Applied);
    let done = row(&outbox, &ids[0]).await;
    assert_eq!((done.status, done.attempts, done.locked_by, done.locked_at), (OutboxStatus::Done, 0, None, None));
    assert!(is_about(done.done_at.unwrap(), Utc::now()));
    assert_eq!(settle(&node, &claimed[0], Disposition::Done).await, Settled::LostLease);
    assert_eq!(row(&outbox, &ids[0]).await.done_at, done.done_at);
}

async fn e2_a_counted_retry_counts_and_waits<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids = write(&outbox, &events(1)).await;
    let node = node(&db, Mode::MultiNode).await;
    let claimed = claim(&node, 1).await;
    assert_eq!(claimed[0].attempt, 1);
    assert_eq!(settle(&node, &claimed[0], retry(Duration::ZERO)).await, Settled::Applied);
    let claimed = claim(&node, 1).await;
    assert_eq!(claimed[0].attempt, 2);
    assert_eq!(settle(&node, &claimed[0], retry(HOUR)).await, Settled::Applied);
    let row = row(&outbox, &ids[0]).await;
    assert_eq!((row.status, row.attempts, row.locked_by, row.done_at), (OutboxStatus::Retry, 2, None, None));
    assert_eq!(row.last_error.as_deref(), Some("503: down"));
    assert!(is_about(row.available_at, now_and_then(HOUR)));
    assert!(claim(&node, 1).await.is_empty());
}

async fn e3_dead_keeps_its_error<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids = write(&outbox, &events(1)).await;
    let node = node(&db, Mode::MultiNode).await;
    let claimed = claim(&node, 1).await;
    let dead = Disposition::Dead(failure().cause("connection refused"));
    assert_eq!(settle(&node, &claimed[0], dead.clone()).await, Settled::Applied);
    assert_eq!(settle(&node, &claimed[0], dead).await, Settled::LostLease);
    let row = row(&outbox, &ids[0]).await;
    assert_eq!((row.status, row.attempts, row.locked_by), (OutboxStatus::Dead, 0, None));
    assert_eq!(row.last_error.as_deref(), Some("503: down (connection refused)"));
    assert!(is_about(row.done_at.unwrap(), Utc::now()));
    assert!(claim(&node, 1).await.is_empty());
}

async fn e4_a_snooze_is_new_again_and_not_counted<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids = write(&outbox, &events(1)).await;
    let node = node(&db, Mode::MultiNode).await;
    let claimed = claim(&node, 1).await;
    settle(&node, &claimed[0], retry(Duration::ZERO)).await;
    let claimed = claim(&node, 1).await;
    assert_eq!(settle(&node, &claimed[0], snooze(HOUR)).await, Settled::Applied);
    let snoozed = row(&outbox, &ids[0]).await;
    assert_eq!((snoozed.status, snoozed.attempts, snoozed.locked_by), (OutboxStatus::New, 1, None));
    assert!(is_about(snoozed.available_at, now_and_then(HOUR)));
}

async fn e5_what_is_finished_stays_as_it_is<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids = write(&outbox, &events(2)).await;
    let marks = Marks::of(&db).await;
    let all = [Disposition::Done, retry(HOUR), snooze(HOUR), Disposition::Dead(failure())];
    for (id, end) in ids.iter().zip([Disposition::Done, Disposition::Dead(Failure::permanent("410", "gone"))]) {
        let seq = row(&outbox, id).await.seq;
        assert!(marks.mark(seq, &end).await);
        let finished = row(&outbox, id).await;
        for disposition in &all {
            assert!(!marks.mark(seq, disposition).await, "{disposition:?} after {end:?}");
        }
        let still = row(&outbox, id).await;
        assert_eq!(format!("{still:?}"), format!("{finished:?}"));
    }
}

async fn e6_a_long_error_is_cut<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids = write(&outbox, &events(2)).await;
    let node = node(&db, Mode::SingleNode).await;
    let claimed = claim(&node, 2).await;
    for (claimed, length) in claimed.iter().zip([3_997, 5_000]) {
        let failure = Failure::permanent("c", "é".repeat(length));
        assert_eq!(settle(&node, claimed, Disposition::Dead(failure)).await, Settled::Applied);
    }
    assert_eq!(row(&outbox, &ids[0]).await.last_error.unwrap(), format!("c: {}", "é".repeat(3_997)));
    let cut = row(&outbox, &ids[1]).await.last_error.unwrap();
    assert_eq!(cut.chars().count(), 4_000);
    assert!(cut.ends_with("é..."));
}

async fn e7_every_mode_of_every_store_can_snooze<H: Harness>(db: H) {
    drop(db);
    for mode in MODES {
        let db = H::start().await;
        let outbox = writer(&db).await;
        let ids = write(&outbox, &events(1)).await;
        let node = node(&db, mode).await;
        for _ in 0..3 {
            let claimed = claim(&node, 1).await;
            assert_eq!(claimed[0].attempt, 1);
            assert_eq!(settle(&node, &claimed[0], snooze(Duration::ZERO)).await, Settled::Applied);
        }
        let row = row(&outbox, &ids[0]).await;
        assert_eq!((row.status, row.attempts, row.last_error), (OutboxStatus::New, 0, None));
    }
}

async fn e8_a_row_that_is_gone_is_no_longer_ours<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids = write(&outbox, &events(1)).await;
    let node = node(&db, Mode::MultiNode).await;
    let claimed = claim(&node, 1).await;
    let store = db.pool().await.open(TableName::default(), Mode::MultiNode).await.unwrap();
    assert_eq!(store.purge(Purge::Everything, Duration::ZERO, 10).await.unwrap(), 1);
    assert_eq!(settle(&node, &claimed[0], Disposition::Done).await, Settled::LostLease);
    assert!(outbox.find(&ids[0]).await.unwrap().is_none());
}
