//! The outbox as a source: who owns it, and what it makes of rows that others wrote.

use std::process::Command;
use std::time::Duration;

use posthaste_core::outbox::{Mode, OpenError, OutboxStatus, Reader};
use posthaste_core::{Disposition, Event, Failure, Settled, Settlement, Source};
use posthaste_sql::TableName;

use crate::support::{CHANNEL_MODES, LEASE, MODES, Outbox, OutboxSource, Postgres, event, ids, is_idle, settle};

#[tokio::test]
async fn a_table_has_one_kind_of_reader_and_one_mode() {
    let postgres = Postgres::start().await;
    postgres.dispatcher(Mode::MultiNode).await;
    postgres.dispatcher(Mode::MultiNode).await;
    let open = |name, reader, mode| Outbox::open(postgres.pool.clone(), name, reader, mode, LEASE);
    let error = open(TableName::default(), Reader::Channels, Mode::MultiNode).await.err().unwrap();
    assert!(matches!(error, OpenError::OtherReader { .. }));
    assert!(error.to_string().contains("another table name"), "{error}");
    let error = open(TableName::default(), Reader::Dispatcher, Mode::SingleNode).await.err().unwrap();
    assert!(matches!(error, OpenError::OtherMode { .. }));
    assert!(error.to_string().contains("multi_node") && error.to_string().contains("outbox_event_owner"), "{error}");
    open(TableName::new("hub_event").unwrap(), Reader::Channels, Mode::SingleNode).await.unwrap();
}

#[tokio::test]
async fn a_database_that_cannot_keep_every_text_is_refused() {
    let postgres = Postgres::start().await;
    postgres.execute("CREATE DATABASE latin TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'").await;
    let (server, _) = postgres.url.rsplit_once('/').unwrap();
    let pool = sqlx::PgPool::connect(&format!("{server}/latin")).await.unwrap();
    let refused = Outbox::open(pool, TableName::default(), Reader::Dispatcher, Mode::MultiNode, LEASE).await;
    let error = refused.err().unwrap().to_string();
    assert!(error.contains("LATIN1") && error.contains("UTF8"), "{error}");
}

#[tokio::test]
async fn ownership_goes_over_when_it_is_given_up() {
    let postgres = Postgres::start().await;
    let (one, other) = (postgres.channels(Mode::SingleNode).await, postgres.channels(Mode::SingleNode).await);
    postgres.write(&one, &[event("1", "a", "{}"), event("2", "b", "{}")]).await;
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
    let postgres = Postgres::start().await;
    let (one, other) = (postgres.channels(Mode::SingleNode).await, postgres.channels(Mode::SingleNode).await);
    let (a, b) = (one.channel_source("a"), one.channel_source("b"));
    a.claim(1).await.unwrap();
    drop(b);
    a.close().await.unwrap();
    let next = other.channel_source("a").claim(1).await.unwrap().next_due;
    assert!(next.is_some_and(|wait| wait < LEASE / 2), "the other owns it now: {next:?}");
}

#[tokio::test]
async fn foreign_inserts_need_two_columns() {
    for mode in MODES {
        let postgres = Postgres::start().await;
        let outbox = postgres.dispatcher(mode).await;
        let psql = Command::new("psql")
            .args([&postgres.url, "-q", "-v", "ON_ERROR_STOP=1", "-c"])
            .arg(
                r#"INSERT INTO outbox_event (event_type, payload) VALUES ('plain', '{"a" : "\\x41 \n"}');
                   INSERT INTO outbox_event (event_type, payload, available_at)
                       VALUES ('past', '{}', '2026-01-01T00:00:00+02:00'), ('future', '{}', '2999-01-01T00:00:00Z');
                   INSERT INTO outbox_event (event_type, payload, headers, occurred_at)
                       VALUES ('full', '{}', '{"z":"1","a":"2"}', '2026-01-01 10:00:00+00')"#,
            )
            .output()
            .expect("the program psql is installed: run ./test, or apt-get install postgresql-client");
        assert!(psql.status.success(), "{}", String::from_utf8_lossy(&psql.stderr));
        let claim = outbox.dispatcher_source().claim(10).await.unwrap();
        let types: Vec<&str> = claim.items.iter().map(|claimed| claimed.item.event.event_type()).collect();
        assert_eq!(types, ["past", "plain", "full"], "in the order of becoming due");
        assert_eq!(claim.items[1].item.event.payload().as_bytes(), br#"{"a" : "\\x41 \n"}"#);
        assert_eq!(claim.items[1].item.event.id().len(), 36);
        let headers = [("z".to_owned(), "1".to_owned()), ("a".to_owned(), "2".to_owned())];
        assert_eq!(claim.items[2].item.event.headers(), headers, "in their order");
        assert_eq!(claim.items[2].item.event.occurred_at().to_rfc3339(), "2026-01-01T10:00:00+00:00");
        assert!(claim.next_due.unwrap() > LEASE / 4, "the future is far");
    }
}

#[tokio::test]
async fn times_that_nobody_can_read_are_refused_at_the_door() {
    let postgres = Postgres::start().await;
    postgres.dispatcher(Mode::SingleNode).await;
    for insert in [
        "INSERT INTO outbox_event (event_type, payload, occurred_at) VALUES ('t', '{}', '-infinity')",
        "INSERT INTO outbox_event (event_type, payload, available_at) VALUES ('t', '{}', 'infinity')",
        "INSERT INTO outbox_event (event_type, payload, occurred_at) VALUES ('t', '{}', '20000-01-01')",
        "INSERT INTO outbox_event (event_type, payload, created_at) VALUES ('t', '{}', '0044-03-15 BC')",
    ] {
        assert!(sqlx::raw_sql(insert).execute(&postgres.pool).await.is_err(), "{insert}");
    }
}

#[tokio::test]
async fn what_cannot_be_read_goes_dead_and_stops_nobody() {
    for mode in MODES {
        let postgres = Postgres::start().await;
        let outbox = postgres.dispatcher(mode).await;
        postgres
            .execute(
                r#"INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('bad id', 't', '{}');
                   INSERT INTO outbox_event (event_id, event_type, payload, headers) VALUES ('list', 't', '{}', '[1]');
                   INSERT INTO outbox_event (event_id, event_type, payload, headers) VALUES ('number', 't', '{}', '{"a":1}');
                   INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('good', 't', '{}');
                   INSERT INTO outbox_event (event_id, event_type, payload, attempts) VALUES ('negative', 't', '', -1);
                   INSERT INTO outbox_event (event_id, event_type, payload_bytes) VALUES ('large', 't', decode(repeat('00', 1048577), 'hex'));
                   INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('good2', 't', '{}')"#,
            )
            .await;
        let source = outbox.dispatcher_source();
        let first = source.claim(4).await.unwrap();
        assert_eq!(ids(&first.items), ["good"]);
        assert_eq!(first.next_due, Some(Duration::ZERO), "there is more");
        assert_eq!(ids(&source.claim(4).await.unwrap().items), ["good2"]);
        for id in ["bad id", "list", "number", "large"] {
            let row = outbox.find(id).await.unwrap().unwrap();
            assert_eq!((row.status, row.attempts), (OutboxStatus::Dead, 0), "{id}");
            assert!(row.event.is_none() && row.done_at.is_some());
            let reason = row.last_error.unwrap();
            assert!(reason.starts_with("undecodable: "), "{reason}");
        }
        assert_eq!(outbox.find("negative").await.unwrap().unwrap().status, OutboxStatus::Dead);
        assert!(is_idle(&source.claim(4).await.unwrap()));
    }
}

#[tokio::test]
async fn a_claim_takes_sixteen_mebibytes_and_says_that_there_is_more() {
    for mode in MODES {
        let postgres = Postgres::start().await;
        let outbox = postgres.dispatcher(mode).await;
        postgres
            .execute(
                "INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('huge', 't', repeat('x', 20000000));
                 INSERT INTO outbox_event (event_type, payload_bytes)
                 SELECT 't', decode(repeat('00', 1048576), 'hex') FROM generate_series(1, 20)",
            )
            .await;
        let source = outbox.dispatcher_source();
        for items in [0, 16] {
            let claim = source.claim(100).await.unwrap();
            assert_eq!((claim.items.len(), claim.next_due), (items, Some(Duration::ZERO)));
        }
        assert_eq!(source.claim(100).await.unwrap().items.len(), 4);
        assert!(is_idle(&source.claim(100).await.unwrap()));
        assert_eq!(outbox.find("huge").await.unwrap().unwrap().status, OutboxStatus::Dead);
    }
}

#[tokio::test]
async fn what_is_recorded_is_what_an_operator_reads() {
    for mode in MODES {
        let postgres = Postgres::start().await;
        let outbox = postgres.dispatcher(mode).await;
        let names = ["done", "counted", "uncounted", "snoozed", "dead", "gone"];
        postgres.write(&outbox, &names.map(|id| event(id, "t", "{}"))).await;
        let source = outbox.dispatcher_source();
        let items = source.claim(10).await.unwrap().items;
        // An operator may end a row under our hands: what is terminal stays as it is.
        postgres.execute("UPDATE outbox_event SET status = 3, last_error = 'discarded' WHERE event_id = 'gone'").await;
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
        let settlements = items.iter().zip(&dispositions).rev();
        let settlements: Vec<_> = settlements
            .map(|(claimed, disposition)| Settlement { claimed, disposition, took: Duration::ZERO })
            .collect();
        let settled = source.settle(&settlements).await.unwrap();
        assert_eq!(settled[0], Settled::LostLease);
        assert_eq!(settled[1..], [Settled::Applied; 5]);

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
        let locked =
            "SELECT count(*) FROM outbox_event WHERE event_id <> 'gone' AND (locked_by, locked_at) IS NOT NULL";
        assert_eq!(postgres.ask::<i64>(locked).await, 0, "settled is not leased");
        let gone = outbox.find("gone").await.unwrap().unwrap();
        assert_eq!((gone.status, gone.last_error.as_deref()), (OutboxStatus::Dead, Some("discarded")));
        assert!(outbox.find("nobody").await.unwrap().is_none());
        let next = source.claim(10).await.unwrap();
        assert!(is_idle(&next) && next.next_due.is_some_and(|wait| wait <= hour));
    }
}

#[tokio::test]
async fn a_drain_finds_what_was_committed_behind_it() {
    for mode in MODES {
        let postgres = Postgres::start().await;
        let outbox = postgres.dispatcher(mode).await;
        let source = outbox.dispatcher_source();
        // Numbered and timed before the others, committed after they were claimed.
        let mut late = postgres.pool.begin().await.unwrap();
        outbox.write(&mut late, &event("late", "t", "{}")).await.unwrap();
        let others: Vec<Event> = (0..10).map(|number| event(&format!("{number}"), "t", "{}")).collect();
        postgres.write(&outbox, &others).await;
        assert_eq!(ids(&source.claim(4).await.unwrap().items), ["0", "1", "2", "3"]);
        late.commit().await.unwrap();
        let mut seen = Vec::new();
        while seen.len() < 7 {
            let claim = source.claim(4).await.unwrap();
            assert!(!claim.items.is_empty(), "{seen:?}");
            seen.extend(ids(&claim.items).into_iter().map(str::to_owned));
        }
        seen.sort();
        assert_eq!(seen, ["4", "5", "6", "7", "8", "9", "late"]);
    }
}

#[tokio::test]
async fn channels_share_one_table_and_find_each_other() {
    for mode in CHANNEL_MODES {
        let postgres = Postgres::start().await;
        let outbox = postgres.channels(mode).await;
        assert!(outbox.pending_types().await.unwrap().is_empty());
        let later = Event::builder("c").text("{}".to_owned()).deliver_after(Duration::from_secs(60)).build().unwrap();
        let events = [event("1", "b", "{}"), event("2", "a", "{}"), event("3", "b", "{}"), later];
        postgres.write(&outbox, &events).await;
        assert_eq!(outbox.pending_types().await.unwrap(), ["a", "b"]);
        let (a, b) = (outbox.channel_source("a"), outbox.channel_source("b"));
        assert_eq!(ids(&a.claim(10).await.unwrap().items), ["2"]);
        let items = b.claim(10).await.unwrap().items;
        assert_eq!(ids(&items), ["1", "3"]);
        for claimed in &items {
            assert_eq!(settle(&b, claimed, Disposition::Done).await, Settled::Applied);
        }
        assert_eq!(outbox.pending_types().await.unwrap(), ["a"]);
    }
}

#[tokio::test]
async fn who_writes_or_commits_wakes_who_reads() {
    let postgres = Postgres::start().await;
    let outbox = postgres.channels(Mode::MultiNode).await;
    let (a, b) = (outbox.channel_source("a"), outbox.channel_source("b"));
    let signalled = |source: &OutboxSource| {
        let wakeup = source.wakeup().clone();
        async move { tokio::time::timeout(Duration::from_millis(50), wakeup.signalled()).await.ok() }
    };
    postgres.write(&outbox, &[event("1", "a", "{}")]).await;
    assert!(signalled(&a).await.is_some());
    assert!(signalled(&b).await.is_none());
    outbox.committed();
    assert!(signalled(&a).await.is_some() && signalled(&b).await.is_some());
    outbox.wake("b");
    assert!(signalled(&a).await.is_none() && signalled(&b).await.is_some());
}
