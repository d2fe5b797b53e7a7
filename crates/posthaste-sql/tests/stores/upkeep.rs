//! What operators ask and do, and what other programs write.

use std::process::{Command, Stdio};
use std::time::Duration;

use posthaste_core::outbox::{DeadFilter, Mode, OutboxStatus, Purge, Store, Upkeep};
use posthaste_core::{Disposition, Event, Failure, Source};

use crate::support::{File, MODES, Outbox, OutboxSource, ids, settle};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn of(id: &str, event_type: &str, aggregate_type: &str) -> std::sync::Arc<Event> {
    let event = Event::text(event_type, "{}").id(id.to_owned()).aggregate(aggregate_type, id);
    event.build().unwrap().into()
}

/// Five events, of which all but the last are dead.
async fn with_dead(file: &File, mode: Mode) -> (Outbox, OutboxSource) {
    let outbox = file.dispatcher(mode).await;
    let events = vec![of("1", "a", "x"), of("2", "b", "x"), of("3", "a", "y"), of("4", "a", "x"), of("5", "a", "x")];
    outbox.ingest(events).await.unwrap();
    let source = outbox.dispatcher_source();
    for claimed in &source.claim(4).await.unwrap().items {
        settle(&source, claimed, Disposition::Dead(Failure::permanent("410", "gone"))).await;
    }
    (outbox, source)
}

#[tokio::test]
async fn the_dead_are_listed_counted_replayed_and_discarded() {
    for mode in MODES {
        let file = File::new();
        let (outbox, source) = with_dead(&file, mode).await;
        let store = outbox.store();
        let listed = async |filter: &DeadFilter, limit| {
            let rows = store.dead(filter, limit).await.unwrap();
            rows.into_iter().map(|row| row.event_id).collect::<Vec<_>>()
        };
        let (all, a, x) = (DeadFilter::all(), DeadFilter::all().event_type("a"), DeadFilter::all().aggregate_type("x"));
        assert_eq!(listed(&all, 10).await, ["1", "2", "3", "4"]);
        assert_eq!(listed(&all, 2).await, ["1", "2"]);
        assert_eq!(listed(&a, 10).await, ["1", "3", "4"]);
        assert_eq!(listed(&a.clone().aggregate_type("x"), 10).await, ["1", "4"]);
        assert_eq!((store.count_dead(&x).await.unwrap(), store.count_dead(&all).await.unwrap()), (3, 4));
        assert_eq!(store.count_dead(&DeadFilter::all().event_type("nobody")).await.unwrap(), 0);

        let (count, last) = store.replay(&a, i64::MIN, 2).await.unwrap();
        assert_eq!((count, listed(&all, 10).await), (2, vec!["2".to_owned(), "4".to_owned()]));
        assert_eq!(store.replay(&a, last, 2).await.unwrap().0, 1);
        let row = store.find("1").await.unwrap().unwrap();
        assert_eq!((row.status, row.attempts, row.done_at, row.last_error), (OutboxStatus::New, 0, None, None));
        assert_eq!(ids(&source.claim(10).await.unwrap().items), ["5", "1", "3", "4"]);

        assert!(!store.discard("1").await.unwrap(), "only what is dead");
        assert!(!store.discard("nobody").await.unwrap());
        assert!(store.discard("2").await.unwrap() && !store.discard("2").await.unwrap());
        assert!(store.find("2").await.unwrap().is_none());
    }
}

#[tokio::test]
async fn what_is_finished_and_old_is_purged_and_nothing_else() {
    for mode in MODES {
        let file = File::new();
        let (outbox, source) = with_dead(&file, mode).await;
        let store = outbox.store();
        let last = source.claim(10).await.unwrap().items.remove(0);
        settle(&source, &last, Disposition::Done).await;
        outbox.ingest(vec![of("pending", "a", "x"), of("young", "a", "x")]).await.unwrap();
        file.execute(
            "UPDATE outbox_event SET created_at = datetime('now', '-9 days') WHERE event_id <> 'young';
             UPDATE outbox_event SET done_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-8 days') WHERE event_id IN ('1', '5');
             UPDATE outbox_event SET done_at = NULL WHERE event_id = '2'",
        )
        .await;
        let purge = async |which, age, limit| store.purge(which, age, limit).await.unwrap();
        assert_eq!(purge(Purge::Done, 9 * DAY, 10).await, 0);
        assert_eq!(purge(Purge::Done, 7 * DAY, 10).await, 1);
        assert!(store.find("5").await.unwrap().is_none());
        assert_eq!(purge(Purge::Dead, 7 * DAY, 1).await, 1);
        assert_eq!(purge(Purge::Dead, 7 * DAY, 10).await, 1);
        assert_eq!(purge(Purge::Dead, 7 * DAY, 10).await, 0, "the others died today");
        assert!(store.find("3").await.unwrap().is_some() && store.find("pending").await.unwrap().is_some());
        assert_eq!(purge(Purge::Everything, 7 * DAY, 2).await, 2);
        assert_eq!(purge(Purge::Everything, 7 * DAY, 2).await, 1);
        assert_eq!(purge(Purge::Everything, 7 * DAY, 2).await, 0);
        assert!(store.find("young").await.unwrap().is_some());
    }
}

#[tokio::test]
async fn a_purge_goes_on_in_batches_and_unparks_what_waited() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::ORDERED).await;
    file.execute(
        "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 1500)
         INSERT INTO outbox_event (event_type, payload, status, created_at) SELECT 't', '{}', 1, datetime('now', '-9 days') FROM n;
         INSERT INTO outbox_event (event_id, event_type, payload, aggregate_id, status, created_at)
             VALUES ('head', 't', '{}', 'k', 3, datetime('now', '-9 days'));
         INSERT INTO outbox_event (event_id, event_type, payload, aggregate_id) VALUES ('behind', 't', '{}', 'k')",
    )
    .await;
    let source = outbox.dispatcher_source();
    assert!(source.claim(10).await.unwrap().items.is_empty());
    assert_eq!(file.ask::<i64>("SELECT parked FROM outbox_event WHERE event_id = 'behind'").await, 1);
    let store = outbox.store();
    for purged in [500, 500, 500, 0] {
        assert_eq!(store.purge(Purge::Done, 7 * DAY, 500).await.unwrap(), purged);
    }
    assert_eq!(store.purge(Purge::Dead, 7 * DAY, 500).await.unwrap(), 1);
    assert_eq!(ids(&source.claim(10).await.unwrap().items), ["behind"]);
}

#[tokio::test]
async fn the_age_of_the_head_is_that_of_what_is_due() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::SingleNode).await;
    assert_eq!(outbox.store().oldest_due().await.unwrap(), None);
    file.execute(
        "INSERT INTO outbox_event (event_type, payload, available_at) VALUES ('t', '{}', datetime('now', '1 hour'));
         INSERT INTO outbox_event (event_type, payload, available_at) VALUES ('t', '{}', datetime('now', '-1 hour'))",
    )
    .await;
    let age = outbox.store().oldest_due().await.unwrap().unwrap();
    assert!(age >= Duration::from_secs(3_600) && age < Duration::from_secs(3_660), "{age:?}");
}

#[tokio::test]
async fn what_is_young_is_left_alone_where_that_is_asked_for() {
    for mode in MODES {
        let file = File::new();
        let outbox = file.dispatcher(mode).await;
        outbox.ingest(vec![of("1", "a", "x"), of("2", "a", "x")]).await.unwrap();
        file.execute("UPDATE outbox_event SET created_at = datetime('now', '-1 hour') WHERE event_id = '2'").await;
        let source = outbox.dispatcher_source().skip_recent(Duration::from_secs(60));
        let claim = source.claim(10).await.unwrap();
        assert_eq!(ids(&claim.items), ["2"]);
        assert!(claim.next_due.is_some_and(|wait| wait >= Duration::from_secs(15)), "{:?}", claim.next_due);
        assert_eq!(ids(&outbox.dispatcher_source().claim(10).await.unwrap().items), ["1"]);
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

/// Nothing that another program can write keeps the others' rows from being claimed.
#[tokio::test]
async fn rows_whose_columns_hold_anything_stop_nobody() {
    for mode in MODES {
        let file = File::new();
        let outbox = file.dispatcher(mode).await;
        file.execute(
            "INSERT INTO outbox_event (event_id, event_type, payload, aggregate_id) VALUES ('blob', 't', '{}', x'ff');
             INSERT INTO outbox_event (event_id, event_type, payload, aggregate_id) VALUES ('text', 't', '{}', CAST(x'ff' AS TEXT));
             INSERT INTO outbox_event (event_id, event_type, payload, attempts) VALUES ('attempts', 't', '{}', 'many');
             INSERT INTO outbox_event (event_id, event_type, payload, created_at) VALUES ('created', 't', '{}', 'once');
             INSERT INTO outbox_event (event_id, event_type, payload, locked_at, locked_by) VALUES ('locked', 't', '{}', 'then', 'me');
             INSERT INTO outbox_event (event_id, event_type, payload) VALUES (CAST(x'ff' AS TEXT), 't', '{}');
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
        let dead: Vec<&str> = dead.iter().map(|row| row.event_id.as_str()).collect();
        assert_eq!(dead, ["blob", "text", "attempts", "\u{fffd}"], "{mode:?}");
    }
}
