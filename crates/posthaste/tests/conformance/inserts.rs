//! How events are inserted, and when claims see them.

use std::time::Duration;

use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use posthaste::{Delay, Event, FaultKind, MAX_PAYLOAD, Mode};
use posthaste_core::outbox::LeaseSet;
use posthaste_core::outbox::roles::*;
use posthaste_core::{Signal, Source};

use crate::harness::{
    Database, Harness, LEASE, MODES, claim, claimed_ids, dispatcher, insert, named, node, on_every_database,
    on_every_server, on_every_store, row, write, write_to, writer,
};

on_every_store! {
    a_write_is_seen_after_its_commit_and_never_after_a_rollback,
    many_events_are_written_in_order,
    the_largest_payloads_are_written_together,
    a_pre_claimed_row_belongs_to_its_writer,
    a_delay_counts_from_the_databases_clock,
}

on_every_database! {
    a_duplicate_event_id_is_refused,
    a_command_line_client_needs_two_columns,
}

on_every_server! {
    a_text_that_is_too_long_is_refused_at_insert,
}

async fn a_write_is_seen_after_its_commit_and_never_after_a_rollback<H: Harness>(db: H) {
    drop(db);
    for mode in H::CLAIMS_BESIDE_A_WRITER {
        let db = H::start().await;
        let table = dispatcher(&db, *mode).await;
        let (store, node) = (table.store(), table.dispatcher_source());
        // In single-node mode this claim acquires the ownership of the table, so that later claims need not write.
        assert!(claim(&node, 10).await.is_empty());
        let mut transaction = store.begin().await.unwrap();
        insert(&table, &mut transaction, &[named("rolled-back")]).await;
        assert!(claim(&node, 10).await.is_empty(), "not committed");
        store.rollback(transaction).await.unwrap();
        assert!(claim(&node, 10).await.is_empty());
        let mut transaction = store.begin().await.unwrap();
        insert(&table, &mut transaction, &[named("committed")]).await;
        assert_eq!(node.wakeup().signalled().await, Signal::Soon);
        store.commit(transaction).await.unwrap();
        table.committed();
        assert_eq!(node.wakeup().signalled().await, Signal::Now);
        assert_eq!(claimed_ids(&claim(&node, 10).await), ["committed"]);
        assert!(writer(&db).await.find("rolled-back").await.unwrap().is_none());
    }
}

async fn many_events_are_written_in_order<H: Harness>(db: H) {
    drop(db);
    for mode in MODES {
        let db = H::start().await;
        let table = dispatcher(&db, mode).await;
        let events: Vec<Event> =
            (0..2_500).map(|number| Event::text("t", number.to_string()).build().unwrap()).collect();
        let mut transaction = table.store().begin().await.unwrap();
        let rows = insert(&table, &mut transaction, &events).await;
        assert!(rows.is_sorted() && rows.len() == events.len());
        assert!(insert(&table, &mut transaction, &[]).await.is_empty());
        table.store().commit(transaction).await.unwrap();
        let node = table.dispatcher_source();
        let mut seen = Vec::new();
        while seen.len() < events.len() {
            let items = claim(&node, 400).await;
            assert!(!items.is_empty());
            seen.extend(claimed_ids(&items));
        }
        assert_eq!(seen, events.iter().map(Event::id).collect::<Vec<_>>());
    }
}

async fn the_largest_payloads_are_written_together<H: Harness>(db: H) {
    let largest = || Event::text("t", "x".repeat(MAX_PAYLOAD)).build().unwrap();
    write(&writer(&db).await, &std::array::from_fn::<_, 10, _>(|_| largest())).await;
    let items = claim(&node(&db, Mode::MultiNode).await, 100).await;
    assert_eq!(items.len(), 10);
    assert!(items.iter().all(|claimed| claimed.item.event.payload().as_bytes().len() == MAX_PAYLOAD));
}

async fn a_duplicate_event_id_is_refused<H: Database>(db: H) {
    let table = dispatcher(&db, Mode::SingleNode).await;
    write_to(&table, &[named("1")]).await;
    let mut transaction = table.store().begin().await.unwrap();
    let refused = table.store().insert(&mut transaction, &[&named("1")], None).await.unwrap_err();
    assert_eq!(refused.kind(), FaultKind::Permanent);
    assert!(refused.chain().contains("event_id"), "{}", refused.chain());
}

async fn a_pre_claimed_row_belongs_to_its_writer<H: Harness>(db: H) {
    let table = dispatcher(&db, Mode::MultiNode).await;
    let (store, node) = (table.store(), table.dispatcher_source());
    let mut transaction = store.begin().await.unwrap();
    let rows = store.insert(&mut transaction, &[&named("ours"), &named("theirs")], Some("claim:1")).await.unwrap();
    store.commit(transaction).await.unwrap();
    let row = row(&writer(&db).await, "ours").await;
    assert_eq!((row.seq, row.locked_by.as_deref(), row.locked_at), (rows[0], Some("claim:1"), Some(row.created_at)));
    assert!(claim(&node, 10).await.is_empty());
    let claim_ids = ["claim:0".to_owned(), "claim:1".to_owned()];
    assert_eq!(store.renew(&claim_ids, &[rows[0], rows[1], i64::MAX]).await.unwrap().applied.len(), 2);
    store.release(&LeaseSet::Rows { claim_ids: &claim_ids, rows: &[rows[1]] }).await.unwrap();
    assert_eq!(claimed_ids(&claim(&node, 10).await), ["theirs"]);
    let renewed = store.renew(&claim_ids, &rows).await.unwrap();
    assert_eq!(renewed.applied.into_iter().collect::<Vec<_>>(), [rows[0]], "another claim has the other row now");
}

async fn a_delay_counts_from_the_databases_clock<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let at = (Utc::now() + TimeDelta::hours(2)).trunc_subsecs(6);
    let wait = Duration::from_millis(3_600_250);
    let build = |id: &str| Event::text("t", "{}").id(id.to_owned());
    let events = [
        build("until").available_at(at),
        build("for").deliver_after(wait),
        build("for-ever").deliver_after(Duration::MAX),
        build("far").available_at(DateTime::<Utc>::MAX_UTC),
        build("ancient").occurred_at(DateTime::<Utc>::MIN_UTC),
        build("in-the-future").occurred_at(DateTime::<Utc>::MAX_UTC),
    ];
    write(&outbox, &events.map(|event| event.build().unwrap())).await;
    let until = row(&outbox, "until").await;
    assert!((until.available_at - at).abs() < H::TICK, "{}", until.available_at);
    assert!(matches!(until.event.unwrap().delay(), Delay::Until(read) if read == until.available_at));
    let delayed = row(&outbox, "for").await;
    let waits = delayed.available_at - delayed.created_at;
    assert!((waits - TimeDelta::from_std(wait).unwrap()).abs() < H::TICK, "{waits}");
    for id in ["for-ever", "far"] {
        assert!(row(&outbox, id).await.available_at > Utc::now() + TimeDelta::days(36_000), "{id}");
    }
    assert_eq!(claimed_ids(&claim(&node(&db, Mode::SingleNode).await, 10).await), ["ancient", "in-the-future"]);
}

/// Any program may write events with the client that comes with the database: `psql`, `mariadb`, `sqlite3`.
async fn a_command_line_client_needs_two_columns<H: Database>(db: H) {
    drop(db);
    for mode in MODES {
        let db = H::start().await;
        let table = dispatcher(&db, mode).await;
        let (backslash, utc) = (H::BACKSLASH, H::UTC);
        let inserts = format!(
            r#"INSERT INTO outbox_event (event_type, payload)
                   VALUES ('plain', '{{"a" : "{backslash}{backslash}x41 {backslash}n"}}');
               INSERT INTO outbox_event (event_type, payload, available_at)
                   VALUES ('past', '{{}}', '2026-01-01 00:00:00{utc}'), ('future', '{{}}', '2999-01-01 00:00:00{utc}');
               INSERT INTO outbox_event (event_type, payload, headers, occurred_at)
                   VALUES ('full', '{{}}', '{{"z":"1","a":"2"}}', '2026-01-01 10:00:00{utc}');"#
        );
        let client = db.client().arg(inserts).output();
        let client = client.expect("the database's client is installed: run ./test, which installs it");
        assert!(client.status.success(), "{}", String::from_utf8_lossy(&client.stderr));
        let claim = table.dispatcher_source().claim(10).await.unwrap();
        let events: Vec<_> = claim.items.iter().map(|claimed| &claimed.item.event).collect();
        let types: Vec<&str> = events.iter().map(|event| event.event_type()).collect();
        assert_eq!(types, ["past", "plain", "full"], "in the order in which they became due");
        assert_eq!(events[1].payload().as_bytes(), br#"{"a" : "\\x41 \n"}"#);
        assert!(events[1].id().len() >= 32, "the database makes an id: {}", events[1].id());
        let headers = [("z".to_owned(), "1".to_owned()), ("a".to_owned(), "2".to_owned())];
        assert_eq!(events[2].headers(), headers, "in their order");
        assert_eq!(events[2].occurred_at().to_rfc3339(), "2026-01-01T10:00:00+00:00");
        assert!(claim.next_due.unwrap() > LEASE / 4, "the future is far");
    }
}

async fn a_text_that_is_too_long_is_refused_at_insert<H: Database>(db: H) {
    dispatcher(&db, Mode::SingleNode).await;
    for column in ["event_type", "aggregate_type", "aggregate_id", "tenant_id", "source_service", "content_type"] {
        let (rest, value) = if column == "event_type" { ("", "") } else { (", event_type", ", 't'") };
        let insert = |length: usize| {
            format!("INSERT INTO outbox_event (payload, {column}{rest}) VALUES ('', repeat('é', {length}){value})")
        };
        db.execute(&insert(255)).await;
        let refused = db.client().arg(insert(256)).output().expect("the database's client is installed: run ./test");
        assert!(!refused.status.success(), "{column}");
    }
}
