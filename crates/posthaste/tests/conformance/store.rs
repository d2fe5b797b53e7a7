//! D, E, F: what a store keeps of an event, what a settlement makes of it, and what a claim gets.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, TimeDelta, Utc};
use posthaste::{
    DatabaseKind, Event, Failure, GLOBAL_AGGREGATE, Mode, OutboxRow, OutboxStatus, Payload, Pool, TableName,
};
use posthaste_core::outbox::{Change, Owner, Purge, Store, Upkeep};
use posthaste_core::{Disposition, Settled, Source};

use crate::harness::{
    Database, Harness, LEASE, Tamper, claim, claimed_ids, event, events, node, on_every_database, on_every_store, row,
    settle, until, write, writer,
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
    f1_only_what_is_due_and_pending_is_claimed,
    f2_a_claim_is_in_order_and_has_a_limit,
    f3_what_is_not_due_is_hidden_until_it_is,
    f4_two_nodes_share_and_do_not_overlap,
    f5_an_expired_claim_is_taken_over,
    f6_a_settlement_ends_the_claim,
    f7_many_claims_at_once_take_each_row_once,
    f8_an_event_is_read_back_as_it_was_written,
}

on_every_database! {
    d1_a_plain_insert_of_another_program_is_an_event,
    d2_no_headers_are_null_and_headers_are_a_json_object,
}

const HOUR: Duration = Duration::from_secs(60 * 60);

fn now_and_then(wait: Duration) -> DateTime<Utc> {
    Utc::now() + wait
}

/// The test and the database are on the same machine.
fn is_about(time: DateTime<Utc>, expected: DateTime<Utc>) -> bool {
    (time - expected).abs() < TimeDelta::seconds(10)
}

/// Everything that can be set, with a time that every database can keep.
fn full_event(payload: &str) -> Event {
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
        .build()
        .unwrap()
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
        assert!(row.seq > last, "row {at} is behind the one before it");
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

async fn d6_a_payload_is_kept_byte_for_byte<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let texts = ["{ \"b\" : 1,\n\t\"a\":1.0,\"a\":2 }", "no JSON \\ ' \" ; -- \u{1f600} é", "", "{}"];
    for text in texts {
        let ids = write(&outbox, &[full_event(text)]).await;
        let stored = row(&outbox, &ids[0]).await.event.unwrap();
        assert_eq!(stored.payload(), &Payload::Text(text.to_owned()));
    }
    let binary = Bytes::from((0..=255).collect::<Vec<u8>>());
    let ids = write(&outbox, &[Event::builder("t").bytes(binary.clone()).build().unwrap()]).await;
    assert_eq!(row(&outbox, &ids[0]).await.event.unwrap().payload(), &Payload::Bytes(binary));
}

fn failure() -> Failure {
    Failure::transient("503", "down")
}

fn retry(after: Duration) -> Disposition {
    Disposition::Retry { after, counted: true, failure: Some(failure()) }
}

fn snooze(after: Duration) -> Disposition {
    Disposition::Retry { after, counted: false, failure: None }
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

/// A store that can be told to record anything about any row, as its single owner.
struct Marks<S> {
    store: S,
    fence: String,
}

impl<S: Store + Upkeep> Marks<S> {
    async fn of<H: Harness<Store = S>>(db: &H) -> Self {
        let store = db.pool().await.open(TableName::default(), Mode::SingleNode).await.unwrap();
        store.register(posthaste_core::outbox::Reader::Dispatcher).await.unwrap();
        let Owner::Us { generation } = store.own("me", LEASE).await.unwrap() else { panic!("nobody else is there") };
        Self { store, fence: format!("me:{generation}") }
    }

    async fn mark(&self, seq: i64, disposition: &Disposition) -> bool {
        let changes = [Change::of(seq, 1, disposition)];
        self.store.record(std::slice::from_ref(&self.fence), &changes).await.unwrap().contains(&seq)
    }
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
    for mode in [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED] {
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

async fn f1_only_what_is_due_and_pending_is_claimed<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids = write(&outbox, &events(6)).await;
    let marks = Marks::of(&db).await;
    let ends = [Disposition::Done, Disposition::Dead(failure()), retry(HOUR), snooze(HOUR), retry(Duration::ZERO)];
    for (id, end) in ids.iter().zip(&ends) {
        assert!(marks.mark(row(&outbox, id).await.seq, end).await);
    }
    marks.store.disown("me").await.unwrap();
    let node = node(&db, Mode::SingleNode).await;
    let mut claimed = claimed_ids(&claim(&node, 10).await);
    claimed.sort();
    assert_eq!(claimed, ids[4..], "the retry that is due and the new one");
}

async fn f2_a_claim_is_in_order_and_has_a_limit<H: Harness>(db: H) {
    drop(db);
    for mode in [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED] {
        let db = H::start().await;
        let outbox = writer(&db).await;
        let due = |ago: i64| {
            let event = Event::text("t", "{}").occurred_at(Utc::now() - TimeDelta::hours(10));
            event.available_at(Utc::now() - TimeDelta::hours(ago)).build().unwrap()
        };
        let ids = write(&outbox, &[event(), due(1), event(), due(3), due(2), event()]).await;
        let in_order = [3, 4, 1, 0, 2, 5].map(|at: usize| ids[at].clone());
        let node = node(&db, mode).await;
        let mut claimed = Vec::new();
        for _ in 0..3 {
            let batch = claimed_ids(&claim(&node, 2).await);
            assert_eq!(batch.len(), 2);
            claimed.extend(batch);
        }
        assert_eq!(claimed, in_order, "{mode:?}");
    }
}

async fn f3_what_is_not_due_is_hidden_until_it_is<H: Harness>(db: H) {
    drop(db);
    for mode in [Mode::SingleNode, Mode::MultiNode] {
        let db = H::start().await;
        let outbox = writer(&db).await;
        let young = node(&db, mode).await.skip_recent(HOUR);
        let fresh = write(&outbox, &events(1)).await;
        assert!(claim(&young, 10).await.is_empty(), "too young");
        db.tamper(Tamper::Age { event_id: &fresh[0], by: HOUR }).await;
        let claimed = claim(&young, 10).await;
        assert_eq!(claimed_ids(&claimed), fresh);
        settle(&young, &claimed[0], Disposition::Done).await;
        young.close().await.unwrap();

        let node = node(&db, mode).await;
        let wait = Duration::from_millis(500);
        let both = write(&outbox, &events(2)).await;
        let claimed = claim(&node, 10).await;
        assert_eq!(claimed_ids(&claimed), both);
        settle(&node, &claimed[0], retry(wait)).await;
        settle(&node, &claimed[1], snooze(wait)).await;
        let delayed = Event::text("t", "{}").deliver_after(wait).build().unwrap();
        write(&outbox, std::slice::from_ref(&delayed)).await;
        let began = tokio::time::Instant::now();
        let early = claim(&node, 10).await;
        assert!(early.is_empty() || began.elapsed() > wait / 2, "a slow machine is no fault");
        let mut seen = claimed_ids(&early);
        while seen.len() < 3 {
            tokio::time::sleep(Duration::from_millis(10)).await;
            seen.extend(claimed_ids(&claim(&node, 10).await));
            assert!(began.elapsed() < Duration::from_secs(20), "{seen:?}");
        }
        seen.sort();
        let mut expected = [both, vec![delayed.id().to_owned()]].concat();
        expected.sort();
        assert_eq!(seen, expected);
    }
}

async fn f4_two_nodes_share_and_do_not_overlap<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids = write(&outbox, &events(3)).await;
    let (first, second) = (node(&db, Mode::MultiNode).await, node(&db, Mode::MultiNode).await);
    assert_eq!(claimed_ids(&claim(&first, 2).await), ids[..2]);
    assert_eq!(claimed_ids(&claim(&second, 10).await), ids[2..]);
    let mut owners = Vec::new();
    for id in &ids {
        let row = row(&outbox, id).await;
        assert!(is_about(row.locked_at.unwrap(), Utc::now()));
        owners.push(row.locked_by.unwrap());
    }
    assert!(owners[0] == owners[1] && owners[1] != owners[2], "{owners:?}");
}

async fn f5_an_expired_claim_is_taken_over<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids = write(&outbox, &events(1)).await;
    let (first, second) = (node(&db, Mode::MultiNode).await, node(&db, Mode::MultiNode).await);
    let stale = claim(&first, 1).await;
    let old_owner = row(&outbox, &ids[0]).await.locked_by;
    assert!(claim(&second, 1).await.is_empty());
    db.tamper(Tamper::Age { event_id: &ids[0], by: LEASE }).await;
    let taken = claim(&second, 1).await;
    assert_eq!((claimed_ids(&taken), taken[0].attempt), (ids.clone(), 1));
    let row = row(&outbox, &ids[0]).await;
    assert!(row.locked_by.is_some() && row.locked_by != old_owner);
    assert_eq!((row.attempts, row.lease_losses), (0, 1));
    assert_eq!(settle(&first, &stale[0], Disposition::Done).await, Settled::LostLease);
    assert_eq!(settle(&second, &taken[0], Disposition::Done).await, Settled::Applied);
}

async fn f6_a_settlement_ends_the_claim<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids = write(&outbox, &events(5)).await;
    let node = node(&db, Mode::MultiNode).await;
    let claimed = claim(&node, 5).await;
    let ends = [Disposition::Done, retry(HOUR), snooze(HOUR), Disposition::Dead(failure())];
    for (claimed, end) in claimed.iter().zip(ends) {
        assert_eq!(settle(&node, claimed, end).await, Settled::Applied);
    }
    node.release(&[&claimed[4]]).await.unwrap();
    for id in &ids {
        let row = row(&outbox, id).await;
        assert!(row.locked_by.is_none() && row.locked_at.is_none(), "{row:?}");
    }
}

async fn f7_many_claims_at_once_take_each_row_once<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    write(&outbox, &events(200)).await;
    let mut nodes = Vec::new();
    for _ in 0..3 {
        nodes.push(node(&db, Mode::MultiNode).await);
    }
    let claims = nodes.into_iter().map(|node| {
        tokio::spawn(async move {
            let mut ids = Vec::new();
            loop {
                match claimed_ids(&claim(&node, 7).await) {
                    none if none.is_empty() => return ids,
                    some => ids.extend(some),
                }
            }
        })
    });
    let mut counts: HashMap<String, usize> = HashMap::new();
    for claims in claims.collect::<Vec<_>>() {
        claims.await.unwrap().into_iter().for_each(|id| *counts.entry(id).or_default() += 1);
    }
    assert!(counts.values().all(|count| *count == 1));
    // A claim leaves out what another has locked at that moment, so somebody may have left too early.
    let last = node(&db, Mode::MultiNode).await;
    let rest = std::cell::Cell::new(200 - counts.len());
    until("everything is claimed", async || {
        rest.set(rest.get() - claim(&last, 200).await.len());
        rest.get() == 0
    })
    .await;
    assert!(counts.len() > 100, "{} rows were claimed by many", counts.len());
}

async fn f8_an_event_is_read_back_as_it_was_written<H: Harness>(db: H) {
    drop(db);
    for mode in [Mode::SingleNode, Mode::MultiNode] {
        let db = H::start().await;
        let outbox = writer(&db).await;
        let written = full_event("{ \"a\": 1 }");
        write(&outbox, std::slice::from_ref(&written)).await;
        let node = node(&db, mode).await;
        let claimed = claim(&node, 1).await;
        assert!(*claimed[0].item.event == written);
        assert!(!claimed[0].item.event.is_delayed());
        settle(&node, &claimed[0], retry(Duration::ZERO)).await;
        let claimed = claim(&node, 1).await;
        assert_eq!(claimed[0].attempt, 2);
        assert!(*claimed[0].item.event == written, "also after a retry, which moved available_at");
        assert_eq!(claimed[0].item.created_at, row(&outbox, written.id()).await.created_at);
    }
}
