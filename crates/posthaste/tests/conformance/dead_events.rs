//! L: events that were given up, and what an operator does about them.

use std::num::NonZeroUsize;

use chrono::Utc;
use posthaste::{DeadFilter, Event, FaultKind, Mode, Outbox, OutboxRow, OutboxStatus};
use posthaste_core::outbox::Store;
use posthaste_core::{Disposition, Source};

use crate::harness::{
    Calls, Harness, all_done, claim, events, failure, node, on_every_store, outbox, row, row_when, settle, watched,
    write, writer,
};

on_every_store! {
    l1_dead_events_are_listed_oldest_first_and_filtered,
    l2_one_is_replayed_as_if_it_had_never_been_tried,
    l2_a_replayed_event_is_delivered_and_a_discarded_one_is_gone,
    l3_all_are_replayed_batch_by_batch,
    l4_they_are_counted,
    l5_a_failing_database_is_an_error,
}

/// Writes events and lets all of them go dead.
async fn bury<H: Harness>(db: &H, outbox: &Outbox<H::Store>, events: &[Event]) -> Vec<String> {
    let ids = write(outbox, events).await;
    let node = node(db, Mode::SingleNode).await;
    loop {
        let claimed = claim(&node, 100).await;
        for claimed in &claimed {
            settle(&node, claimed, Disposition::Dead(failure())).await;
        }
        if claimed.is_empty() {
            node.close().await.unwrap();
            return ids;
        }
    }
}

fn ids(rows: &[OutboxRow]) -> Vec<String> {
    rows.iter().map(|row| row.event_id.clone()).collect()
}

async fn list<S: Store>(outbox: &Outbox<S>, filter: &DeadFilter) -> Vec<String> {
    ids(&outbox.dead().list(filter, 100).await.unwrap())
}

/// Of two types, with and without an aggregate.
fn mixed() -> Vec<Event> {
    let event =
        |event_type: &str, aggregate: &str| Event::text(event_type, "{}").aggregate_type(aggregate).build().unwrap();
    vec![event("t", "a"), event("u", "a"), event("t", "b"), event("t", "a")]
}

async fn l1_dead_events_are_listed_oldest_first_and_filtered<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let dead = bury(&db, &outbox, &mixed()).await;
    write(&outbox, &events(1)).await;
    let all = DeadFilter::all();
    assert_eq!(list(&outbox, &all).await, dead, "the pending one is not among them");
    let of = |places: &[usize]| places.iter().map(|at| dead[*at].clone()).collect::<Vec<_>>();
    assert_eq!(list(&outbox, &all.clone().event_type("t")).await, of(&[0, 2, 3]));
    assert_eq!(list(&outbox, &all.clone().aggregate_type("a")).await, of(&[0, 1, 3]));
    assert_eq!(list(&outbox, &all.clone().event_type("t").aggregate_type("a")).await, of(&[0, 3]));
    assert!(list(&outbox, &all.clone().event_type("x")).await.is_empty());
    let rows = outbox.dead().list(&all, 2).await.unwrap();
    assert_eq!(ids(&rows), dead[..2]);
    assert_eq!((rows[0].status, rows[0].last_error.as_deref()), (OutboxStatus::Dead, Some("503: down")));
}

async fn l2_one_is_replayed_as_if_it_had_never_been_tried<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let dead = bury(&db, &outbox, &events(2)).await;
    assert!(outbox.dead().replay(&dead[0]).await.unwrap());
    let replayed = row(&outbox, &dead[0]).await;
    assert_eq!((replayed.status, replayed.attempts, replayed.lease_losses), (OutboxStatus::New, 0, 0));
    assert!((Utc::now() - replayed.available_at).num_seconds().abs() < 10);
    let OutboxRow { done_at, last_error, locked_by, locked_at, .. } = &replayed;
    assert!(done_at.is_none() && last_error.is_none() && locked_by.is_none() && locked_at.is_none());
    assert!(!outbox.dead().replay(&dead[0]).await.unwrap(), "it is no longer dead");
    assert_eq!(format!("{:?}", row(&outbox, &dead[0]).await), format!("{replayed:?}"));
    assert!(!outbox.dead().replay("nobody").await.unwrap());
    assert_eq!(row(&outbox, &dead[1]).await.status, OutboxStatus::Dead);
}

async fn l2_a_replayed_event_is_delivered_and_a_discarded_one_is_gone<H: Harness>(db: H) {
    let dead = bury(&db, &writer(&db).await, &events(2)).await;
    let calls = Calls::default();
    let outbox = outbox(&db, &calls, |builder| builder).await;
    assert!(outbox.dead().replay(&dead[0]).await.unwrap());
    all_done(&outbox, &dead[..1]).await;
    assert!(outbox.dead().discard(&dead[1]).await.unwrap());
    assert!(!outbox.dead().discard(&dead[1]).await.unwrap());
    assert!(!outbox.dead().discard(&dead[0]).await.unwrap(), "done is not dead");
    outbox.close().await;
    assert_eq!(calls.ids(), dead[..1]);
    assert!(outbox.find(&dead[1]).await.unwrap().is_none());
}

async fn l3_all_are_replayed_batch_by_batch<H: Harness>(db: H) {
    let (pool, book) = watched(&db).await;
    let outbox = Outbox::new(pool).mode(Mode::WriterOnly).start().await.unwrap();
    let dead = bury(&db, &writer(&db).await, &events(25)).await;
    // A batch of nothing cannot be asked for: its size is never zero by its type.
    let batch = NonZeroUsize::new(10).unwrap();
    assert_eq!(outbox.dead().replay_all(&DeadFilter::all(), batch).await.unwrap(), 25);
    assert_eq!(book.calls("replay"), [10, 10, 10], "until one came back short");
    assert_eq!(outbox.dead().replay_all(&DeadFilter::all(), batch).await.unwrap(), 0);
    for id in &dead {
        row_when(&outbox, id, |row| row.status == OutboxStatus::New).await;
    }
    let again = bury(&db, &writer(&db).await, &mixed()).await;
    let only = DeadFilter::all().event_type("u");
    assert_eq!(outbox.dead().replay_all(&only, batch).await.unwrap(), 1);
    assert_eq!(row(&outbox, &again[1]).await.status, OutboxStatus::New);
}

async fn l4_they_are_counted<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    assert_eq!(outbox.dead().count(&DeadFilter::all()).await.unwrap(), 0);
    bury(&db, &outbox, &mixed()).await;
    write(&outbox, &events(1)).await;
    assert_eq!(outbox.dead().count(&DeadFilter::all()).await.unwrap(), 4);
    assert_eq!(outbox.dead().count(&DeadFilter::all().event_type("t")).await.unwrap(), 3);
    assert_eq!(outbox.dead().count(&DeadFilter::all().event_type("t").aggregate_type("b")).await.unwrap(), 1);
    assert_eq!(outbox.dead().count(&DeadFilter::all().event_type("x")).await.unwrap(), 0);
}

async fn l5_a_failing_database_is_an_error<H: Harness>(db: H) {
    let (pool, book) = watched(&db).await;
    let outbox = Outbox::new(pool).mode(Mode::WriterOnly).start().await.unwrap();
    for statement in ["dead", "count_dead", "replay", "discard", "find"] {
        book.refuse(statement, usize::MAX);
    }
    let (all, batch) = (DeadFilter::all(), NonZeroUsize::new(10).unwrap());
    let errors = [
        outbox.dead().list(&all, 10).await.err(),
        outbox.dead().count(&all).await.err(),
        outbox.dead().replay("x").await.err(),
        outbox.dead().replay_all(&all, batch).await.err(),
        outbox.dead().discard("x").await.err(),
        outbox.find("x").await.err(),
    ];
    assert!(errors.iter().all(|error| error.as_ref().is_some_and(|error| error.kind() == FaultKind::Transient)));
}
