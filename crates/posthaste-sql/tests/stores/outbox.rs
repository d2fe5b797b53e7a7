//! The outbox as a source: who owns it, and what it makes of rows that others wrote.

use std::time::Duration;

use posthaste_core::outbox::{Mode, OpenError, OutboxStatus, Reader};
use posthaste_core::{Disposition, Event, Failure, Settled, Source};
use posthaste_sql::TableName;
use posthaste_sql::sqlite::Ingested;

use crate::support::{
    CHANNEL_MODES, File, LEASE, MODES, Outbox, OutboxSource, event, execute, is_idle, settle, try_execute,
};

#[tokio::test]
async fn a_table_has_one_kind_of_reader_and_one_mode() {
    let file = File::new();
    file.dispatcher(Mode::MultiNode).await;
    file.dispatcher(Mode::MultiNode).await;
    let open = async |table, reader, mode| Outbox::open(file.open().await, table, reader, mode, LEASE).await;
    let error = open(TableName::default(), Reader::Channels, Mode::MultiNode).await.err().unwrap();
    assert!(matches!(error, OpenError::OtherReader { .. }));
    assert!(error.to_string().contains("another table name"), "{error}");
    let error = open(TableName::default(), Reader::Dispatcher, Mode::ORDERED).await.err().unwrap();
    assert!(matches!(error, OpenError::OtherMode { .. }));
    let hub = TableName::new("hub_event").unwrap();
    open(hub, Reader::Channels, Mode::SingleNode).await.unwrap();
}

#[tokio::test]
async fn ownership_goes_over_when_it_is_given_up() {
    let file = File::new();
    let (one, other) = (file.channels(Mode::SingleNode).await, file.channels(Mode::SingleNode).await);
    one.ingest(vec![event("1", "a", "{}"), event("2", "b", "{}")]).await.unwrap();
    let (a, b) = (one.channel_source("a"), one.channel_source("b"));
    let held = a.claim(10).await.unwrap().items.remove(0);
    let second = other.channel_source("a");
    let waiting = second.claim(10).await.unwrap();
    assert!(waiting.items.is_empty());
    assert!(waiting.next_due.is_some_and(|wait| wait > LEASE / 2 && wait <= LEASE), "{:?}", waiting.next_due);

    a.close().await.unwrap();
    assert!(second.claim(10).await.unwrap().items.is_empty(), "b still reads");
    b.close().await.unwrap();
    b.close().await.unwrap();
    let taken = second.claim(10).await.unwrap().items.remove(0);
    assert!(taken.item.generation > held.item.generation);
    assert_eq!(settle(&a, &held, Disposition::Done).await, Settled::LostLease);
    assert_eq!(settle(&second, &taken, Disposition::Done).await, Settled::Applied);
}

#[tokio::test]
async fn a_source_that_was_dropped_does_not_keep_the_others_from_closing() {
    let file = File::new();
    let (one, other) = (file.channels(Mode::SingleNode).await, file.channels(Mode::SingleNode).await);
    let (a, b) = (one.channel_source("a"), one.channel_source("b"));
    a.claim(1).await.unwrap();
    drop(b);
    a.close().await.unwrap();
    let next = other.channel_source("a").claim(1).await.unwrap().next_due;
    assert!(next.is_some_and(|wait| wait < LEASE / 2), "the other owns it now: {next:?}");
}

#[tokio::test]
async fn a_process_that_is_alone_need_not_wait_for_the_lease_of_a_dead_one() {
    let file = File::new();
    let (dead, alive) = (file.dispatcher(Mode::SingleNode).await, file.dispatcher(Mode::SingleNode).await);
    dead.ingest(vec![event("1", "a", "{}")]).await.unwrap();
    let lost = dead.dispatcher_source();
    let held = lost.claim(10).await.unwrap().items.remove(0);
    let source = alive.dispatcher_source();
    assert!(source.claim(10).await.unwrap().items.is_empty());
    alive.store().void_lease().await.unwrap();
    assert_eq!(source.claim(10).await.unwrap().items.len(), 1);
    assert_eq!(settle(&lost, &held, Disposition::Done).await, Settled::LostLease);
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
        assert!(claim.next_due.unwrap() > LEASE / 4, "the future is far");
    }
}

#[tokio::test]
async fn what_cannot_be_read_goes_dead_and_stops_nobody() {
    for mode in MODES {
        let file = File::new();
        let (database, outbox) = (file.open().await, file.dispatcher(mode).await);
        execute(
            &database,
            "INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('bad id', 't', '{}');
             INSERT INTO outbox_event (event_id, event_type, payload, headers) VALUES ('list', 't', '{}', '[1]');
             INSERT INTO outbox_event (event_id, event_type, payload, headers) VALUES ('number', 't', '{}', '{\"a\":1}');
             INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('good', 't', '{}');
             INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('utf8', 't', CAST(x'ff' AS TEXT));
             INSERT INTO outbox_event (event_id, event_type, payload_bytes) VALUES ('large', 't', zeroblob(1048577));
             INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('good2', 't', '{}')",
        )
        .await;
        let source = outbox.dispatcher_source();
        let first = source.claim(4).await.unwrap();
        assert_eq!(first.items.iter().map(|claimed| claimed.item.event.id()).collect::<Vec<_>>(), ["good"]);
        assert_eq!(first.next_due, Some(Duration::ZERO), "there is more");
        let second = source.claim(4).await.unwrap();
        assert_eq!(second.items.iter().map(|claimed| claimed.item.event.id()).collect::<Vec<_>>(), ["good2"]);
        for id in ["bad id", "list", "number", "utf8", "large"] {
            let row = outbox.find(id).await.unwrap().unwrap();
            assert_eq!((row.status, row.attempts), (OutboxStatus::Dead, 0), "{id}");
            assert!(row.event.is_none() && row.done_at.is_some());
            let reason = row.last_error.unwrap();
            assert!(reason.starts_with("undecodable: "), "{reason}");
        }
        assert!(is_idle(&source.claim(4).await.unwrap()));
    }
}

#[tokio::test]
async fn an_event_type_that_is_no_text_goes_dead_and_hides_no_other() {
    let file = File::new();
    let (owner, second) = (file.channels(Mode::SingleNode).await, file.channels(Mode::SingleNode).await);
    let database = file.open().await;
    let blob = "INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('blob', x'61', '{}')";
    assert!(try_execute(&database, blob).await.is_err(), "the table refuses what is no text");
    // A program may have the checks off, and none sees whether a text is UTF-8.
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
    assert_eq!(owner.find("first").await.unwrap().unwrap().status, OutboxStatus::New, "the owner's to bury");
    for _ in 0..2 {
        assert_eq!(owner.pending_types().await.unwrap(), ["a", "z"]);
    }
    for id in ["blob", "first", "retry"] {
        let row = owner.find(id).await.unwrap().unwrap();
        assert_eq!((row.status, row.attempts, row.done_at.is_some()), (OutboxStatus::Dead, 0, true), "{id}");
        assert_eq!(row.last_error.as_deref(), Some("undecodable: event_type is not text in UTF-8"));
    }
    assert_eq!(owner.find("done").await.unwrap().unwrap().status, OutboxStatus::Done);
    let ingested = owner.ingest(vec![event("first", "a", "{}"), event("new", "a", "{}")]).await.unwrap();
    assert_eq!(ingested, [Ingested::Conflict, Ingested::Stored]);
    assert_eq!(owner.channel_source("a").claim(10).await.unwrap().items.len(), 2, "not the one of the same bytes");
}

#[tokio::test]
async fn a_claim_takes_sixteen_mebibytes_and_says_that_there_is_more() {
    for mode in MODES {
        let file = File::new();
        let (database, outbox) = (file.open().await, file.dispatcher(mode).await);
        execute(
            &database,
            "INSERT INTO outbox_event (event_id, event_type, payload_bytes) VALUES ('huge', 't', zeroblob(20000000));
             WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 20)
             INSERT INTO outbox_event (event_type, payload_bytes) SELECT 't', zeroblob(1048576) FROM n",
        )
        .await;
        let source = outbox.dispatcher_source();
        for items in [0, 16] {
            let claim = source.claim(100).await.unwrap();
            assert_eq!((claim.items.len(), claim.next_due), (items, Some(Duration::ZERO)), "{mode:?}");
        }
        assert_eq!(source.claim(100).await.unwrap().items.len(), 4);
        assert!(is_idle(&source.claim(100).await.unwrap()));
        assert_eq!(outbox.find("huge").await.unwrap().unwrap().status, OutboxStatus::Dead);
    }
}

#[tokio::test]
async fn what_is_recorded_is_what_an_operator_reads() {
    for mode in MODES {
        let file = File::new();
        let (database, outbox) = (file.open().await, file.dispatcher(mode).await);
        let names = ["done", "counted", "uncounted", "snoozed", "dead", "gone"];
        outbox.ingest(names.map(|id| event(id, "t", "{}")).to_vec()).await.unwrap();
        let source = outbox.dispatcher_source();
        let items = source.claim(10).await.unwrap().items;
        // An operator may end a row under our hands: what is terminal stays as it is.
        execute(&database, "UPDATE outbox_event SET status = 3, last_error = 'discarded' WHERE event_id = 'gone'")
            .await;
        let failure = || Failure::transient("503", "x".repeat(5_000));
        let hour = Duration::from_secs(3_600);
        let dispositions = [
            Disposition::Done,
            Disposition::Retry { after: hour, counted: true, failure: Some(failure()) },
            Disposition::Retry { after: hour, counted: false, failure: Some(failure()) },
            Disposition::Retry { after: hour, counted: false, failure: None },
            Disposition::Dead(failure()),
            Disposition::Done,
        ];
        let settlements: Vec<_> = items
            .iter()
            .zip(&dispositions)
            .map(|(claimed, disposition)| posthaste_core::Settlement { claimed, disposition, took: Duration::ZERO })
            .collect();
        let settled = source.settle(&settlements).await.unwrap();
        assert_eq!(settled[..5], [Settled::Applied; 5]);
        assert_eq!(settled[5], Settled::LostLease);

        let expected = [
            (OutboxStatus::Done, 0, false),
            (OutboxStatus::Retry, 1, true),
            (OutboxStatus::Retry, 0, true),
            (OutboxStatus::New, 0, false),
            (OutboxStatus::Dead, 0, true),
        ];
        for (id, (status, attempts, has_error)) in names.into_iter().zip(expected) {
            let row = outbox.find(id).await.unwrap().unwrap();
            assert_eq!((row.status, row.attempts, row.last_error.is_some()), (status, attempts, has_error), "{id}");
            assert_eq!(row.done_at.is_some(), matches!(status, OutboxStatus::Done | OutboxStatus::Dead), "{id}");
            let waits = matches!(status, OutboxStatus::New | OutboxStatus::Retry);
            assert_eq!(row.available_at - row.created_at > chrono::TimeDelta::minutes(59), waits, "{id}");
            if let Some(error) = row.last_error {
                assert!(error.chars().count() == 4_000 && error.ends_with("x..."));
            }
        }
        let gone = outbox.find("gone").await.unwrap().unwrap();
        assert_eq!((gone.status, gone.last_error.as_deref()), (OutboxStatus::Dead, Some("discarded")));
        assert!(outbox.find("nobody").await.unwrap().is_none());
        let next = source.claim(10).await.unwrap();
        assert!(is_idle(&next) && next.next_due.is_some_and(|wait| wait <= hour));
    }
}

#[tokio::test]
async fn channels_share_one_table_and_find_each_other() {
    for mode in CHANNEL_MODES {
        let file = File::new();
        let outbox = file.channels(mode).await;
        assert!(outbox.pending_types().await.unwrap().is_empty());
        let late = Event::builder("late").text("{}".to_owned()).deliver_after(LEASE).build().unwrap();
        let events = vec![event("1", "b", "{}"), event("2", "a", "{}"), event("3", "b", "{}"), late.into()];
        outbox.ingest(events).await.unwrap();
        assert_eq!(outbox.pending_types().await.unwrap(), ["a", "b"]);
        let b = outbox.channel_source("b");
        let items = b.claim(10).await.unwrap().items;
        assert_eq!(items.iter().map(|claimed| claimed.item.event.id()).collect::<Vec<_>>(), ["1", "3"]);
        for claimed in &items {
            assert_eq!(settle(&b, claimed, Disposition::Done).await, Settled::Applied);
        }
        assert_eq!(outbox.pending_types().await.unwrap(), ["a"]);
    }
}

#[tokio::test]
async fn who_ingests_or_writes_wakes_who_reads() {
    for mode in CHANNEL_MODES {
        let file = File::new();
        let outbox = file.channels(mode).await;
        let (a, b) = (outbox.channel_source("a"), outbox.channel_source("b"));
        let signalled = |source: &OutboxSource| {
            let wakeup = source.wakeup().clone();
            async move { tokio::time::timeout(Duration::from_millis(50), wakeup.signalled()).await.ok() }
        };
        outbox.ingest(vec![event("1", "a", "{}")]).await.unwrap();
        assert!(signalled(&a).await.is_some());
        assert!(signalled(&b).await.is_none());
        outbox.committed();
        assert!(signalled(&a).await.is_some() && signalled(&b).await.is_some());
        outbox.wake("b");
        assert!(signalled(&a).await.is_none() && signalled(&b).await.is_some());
    }
}
