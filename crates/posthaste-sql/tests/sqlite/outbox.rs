//! Behaviour that only SQLite has: its time formats, its columns without fixed types, and exclusive use of a file.

use std::process::{Command, Stdio};

use chrono::Utc;
use posthaste_core::hub_store::Ingested;
use posthaste_core::outbox::{DeadFilter, Mode, OpenError, OperatorStore, OutboxStatus, Reader, Store, Table};
use posthaste_core::{Disposition, Event, Settled, Source};
use posthaste_sql::TableName;

use crate::support::{File, LEASE, MODES, event, execute, settle, try_execute};

#[tokio::test]
async fn after_void_lease_a_process_claims_the_rows_of_a_crashed_one_at_once() {
    let file = File::new();
    let (crashed, alive) = (file.dispatcher(Mode::SingleNode).await, file.dispatcher(Mode::SingleNode).await);
    crashed.store().ingest(vec![event("1", "a", "{}")]).await.unwrap();
    let lost = crashed.dispatcher_source();
    let claimed = lost.claim(10).await.unwrap().items.remove(0);
    let source = alive.dispatcher_source();
    assert!(source.claim(10).await.unwrap().items.is_empty());
    alive.store().void_lease().await.unwrap();
    assert_eq!(source.claim(10).await.unwrap().items.len(), 1);
    assert_eq!(settle(&lost, &claimed, Disposition::Done).await, Settled::LostLease);
}

#[tokio::test]
async fn after_void_lease_a_process_may_have_another_lease_than_its_predecessor() {
    let file = File::new();
    file.dispatcher(Mode::SingleNode).await;
    let store = file.open().await.outbox(TableName::default(), Mode::SingleNode).await.unwrap();
    let refused = Table::open(store.clone(), Reader::Dispatcher, LEASE / 2).await.err();
    assert!(matches!(refused, Some(OpenError::OtherLease { .. })));
    store.void_lease().await.unwrap();
    Table::open(store, Reader::Dispatcher, LEASE / 2).await.unwrap();
}

#[tokio::test]
async fn a_time_keeps_its_nanoseconds() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::SingleNode).await;
    let written = Event::text("t", "{}").occurred_at(Utc::now()).build().unwrap();
    outbox.store().ingest(vec![written.clone().into()]).await.unwrap();
    let items = outbox.dispatcher_source().claim(10).await.unwrap().items;
    assert_eq!(*items[0].item.event, written);
}

#[tokio::test]
async fn foreign_inserts_need_two_columns() {
    for mode in MODES {
        let file = File::new();
        let (database, outbox) = (file.open().await, file.dispatcher(mode).await);
        execute(
            &database,
            "INSERT INTO outbox_event (event_type, payload) VALUES ('plain', '{\"a\" : 1}');
             INSERT INTO outbox_event (event_type, payload, available_at) VALUES ('past', '{}', '2026-01-01T00:00:00+02:00');
             INSERT INTO outbox_event (event_type, payload, available_at) VALUES ('future', '{}', '2999-01-01T00:00:00Z');
             INSERT INTO outbox_event (event_type, payload, headers, occurred_at)
                 VALUES ('full', '{}', '{\"z\":\"1\",\"a\":\"2\"}', '2026-01-01 10:00:00')",
        )
        .await;
        let source = outbox.dispatcher_source();
        let claim = source.claim(10).await.unwrap();
        let types: Vec<&str> = claim.items.iter().map(|claimed| claimed.item.event.event_type()).collect();
        assert_eq!(types, ["past", "plain", "full"], "in the order of becoming due");
        assert_eq!(claim.items[1].item.event.payload().as_bytes(), b"{\"a\" : 1}");
        assert_eq!(claim.items[1].item.event.id().len(), 32);
        let headers = [("z".to_owned(), "1".to_owned()), ("a".to_owned(), "2".to_owned())];
        assert_eq!(claim.items[2].item.event.headers(), headers, "in their order");
        assert_eq!(claim.items[2].item.event.occurred_at().to_rfc3339(), "2026-01-01T10:00:00+00:00");
        assert!(claim.next_due.unwrap() > LEASE / 4, "the future row is not due soon");
    }
}

#[tokio::test]
async fn the_program_sqlite3_writes_events() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::MultiNode).await;
    let insert = "INSERT INTO outbox_event (event_type, payload) VALUES ('order.placed', '{\"id\" : 7}');";
    let program = Command::new("sqlite3").arg(file.path()).arg(insert).stdin(Stdio::null()).output().unwrap();
    assert!(program.status.success(), "{}", String::from_utf8_lossy(&program.stderr));
    let items = outbox.dispatcher_source().claim(10).await.unwrap().items;
    assert_eq!(items[0].item.event.payload().as_bytes(), b"{\"id\" : 7}");
    assert_eq!(items[0].item.event.event_type(), "order.placed");
    assert!(!items[0].item.event.is_delayed());
    assert_eq!(outbox.store().table().as_str(), "outbox_event");
}

/// A bad row of another program does not keep other rows from being claimed.
#[tokio::test]
async fn rows_with_unreadable_columns_do_not_stop_other_rows() {
    for mode in MODES {
        let file = File::new();
        let outbox = file.dispatcher(mode).await;
        file.execute(
            "INSERT INTO outbox_event (event_id, event_type, payload, aggregate_id) VALUES ('blob', 't', '{}', x'ff');
             INSERT INTO outbox_event (event_id, event_type, payload, aggregate_id) VALUES ('text', 't', '{}', CAST(x'ff' AS TEXT));
             INSERT INTO outbox_event (event_id, event_type, payload, attempts) VALUES ('attempts', 't', '{}', 'many');
             PRAGMA ignore_check_constraints = ON;
             INSERT INTO outbox_event (event_id, event_type, payload, created_at) VALUES ('created', 't', '{}', 'once');
             PRAGMA ignore_check_constraints = OFF;
             INSERT INTO outbox_event (event_id, event_type, payload, locked_at, locked_by) VALUES ('locked', 't', '{}', 'then', 'me');
             INSERT INTO outbox_event (event_id, event_type, payload) VALUES (CAST(x'ff' AS TEXT), 't', '{}');
             INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('utf8', 't', CAST(x'ff' AS TEXT));
             INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('good', 't', '{}')",
        )
        .await;
        let source = outbox.dispatcher_source();
        let mut seen = Vec::new();
        for _ in 0..5 {
            for claimed in &source.claim(10).await.unwrap().items {
                seen.push(claimed.item.event.id().to_owned());
                settle(&source, claimed, Disposition::Done).await;
            }
        }
        seen.sort();
        assert_eq!(seen, ["created", "good", "locked"], "{mode:?}");
        let dead = outbox.store().dead(&DeadFilter::all(), 10).await.unwrap();
        let ids: Vec<&str> = dead.iter().map(|row| row.event_id.as_str()).collect();
        assert_eq!(ids, ["blob", "text", "attempts", "\u{fffd}", "utf8"], "{mode:?}");
        for row in &dead {
            assert!(row.event.is_none() && row.done_at.is_some() && row.attempts == 0, "{row:?}");
            assert!(row.last_error.as_ref().is_some_and(|reason| reason.starts_with("undecodable: ")), "{row:?}");
        }
    }
}

#[tokio::test]
async fn an_event_type_that_is_not_text_becomes_dead_and_hides_no_other_type() {
    let file = File::new();
    let (owner, second) = (file.channels(Mode::SingleNode).await, file.channels(Mode::SingleNode).await);
    let database = file.open().await;
    let blob = "INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('blob', x'61', '{}')";
    assert!(try_execute(&database, blob).await.is_err(), "the table refuses a type that is not text");
    // A program may switch the checks off, and no check sees that a text is not UTF-8.
    execute(
        &database,
        "PRAGMA ignore_check_constraints = ON;
         INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('blob', x'61', '{}');
         PRAGMA ignore_check_constraints = OFF;
         INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('first', CAST(x'ff41' AS TEXT), '{}');
         INSERT INTO outbox_event (event_id, event_type, payload, status) VALUES ('retry', CAST(x'ff41' AS TEXT), '{}', 2);
         INSERT INTO outbox_event (event_id, event_type, payload, status) VALUES ('done', CAST(x'ff41' AS TEXT), '{}', 1);
         INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('good', 'a', '{}');
         INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('good2', 'z', '{}')",
    )
    .await;
    assert!(owner.channel_source("other").claim(1).await.unwrap().items.is_empty());
    assert_eq!(second.pending_types().await.unwrap(), ["a", "z"]);
    assert_eq!(
        owner.store().find("first").await.unwrap().unwrap().status,
        OutboxStatus::New,
        "only the owner marks it as DEAD"
    );
    for _ in 0..2 {
        assert_eq!(owner.pending_types().await.unwrap(), ["a", "z"]);
    }
    for id in ["blob", "first", "retry"] {
        let row = owner.store().find(id).await.unwrap().unwrap();
        assert_eq!((row.status, row.attempts, row.done_at.is_some()), (OutboxStatus::Dead, 0, true), "{id}");
        assert_eq!(row.last_error.as_deref(), Some("undecodable: event_type is not text in UTF-8"));
    }
    assert_eq!(owner.store().find("done").await.unwrap().unwrap().status, OutboxStatus::Done);
    let ingested = owner.store().ingest(vec![event("first", "a", "{}"), event("new", "a", "{}")]).await.unwrap();
    assert_eq!(ingested, [Ingested::Conflict, Ingested::Stored]);
    assert_eq!(owner.channel_source("a").claim(10).await.unwrap().items.len(), 2, "not the BLOB of the same bytes");
}
