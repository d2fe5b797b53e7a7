//! M: how long finished events are kept.

use std::time::Duration;

use posthaste::{Event, Mode, Outbox, OutboxStatus, Pool, Retention, Settings, StartError, TableName};
use posthaste_core::Disposition;
use posthaste_core::Source;
use posthaste_core::outbox::{OperatorStore, Purge, Store};

use crate::harness::{
    Calls, DAY, Harness, Tamper, Watched, all_done, claim, events, failure, node, on_every_store, outbox, retry, row,
    settle, until, watched, write, writer,
};

on_every_store! {
    m1_finished_events_go_by_the_time_of_their_end,
    m2_everything_goes_by_the_time_of_its_insert,
    m3_a_purge_has_a_limit_and_counts,
    m4_purging_goes_on_batch_by_batch_and_from_time_to_time,
}

/// One of each status: new, done, retry, dead.
async fn one_of_each<H: Harness>(db: &H, outbox: &Outbox<Watched<H::Store>>) -> Vec<String> {
    let ids = write(outbox, &events(4)).await;
    let node = node(db, Mode::SingleNode).await;
    let claimed = claim(&node, 4).await;
    let ends = [Disposition::Done, retry(Duration::ZERO), Disposition::Dead(failure())];
    for (claimed, end) in claimed[1..].iter().zip(ends) {
        settle(&node, claimed, end).await;
    }
    node.close().await.unwrap();
    ids
}

/// A writer that keeps what it is told to, and whose first purge of this many statements is over.
async fn keeping<H: Harness>(db: &H, retention: Retention, statements: usize) -> Outbox<Watched<H::Store>> {
    let (pool, book) = watched(db).await;
    let outbox = Outbox::new(pool).mode(Mode::WriterOnly).purge(retention).start().await.unwrap();
    until("it has purged", async || book.calls("purge").len() >= statements).await;
    outbox
}

async fn left<S: Store>(outbox: &Outbox<S>, ids: &[String]) -> Vec<OutboxStatus> {
    let mut left = Vec::new();
    for id in ids {
        left.extend(outbox.find(id).await.unwrap().map(|row| row.status));
    }
    left
}

async fn m1_finished_events_go_by_the_time_of_their_end<H: Harness>(db: H) {
    let keep = Retention { done: Some(DAY), dead: Some(2 * DAY), ..Retention::default() };
    let outbox = keeping(&db, keep, 2).await;
    use OutboxStatus::{Dead, Done, New, Retry};
    // Written long ago and finished just now.
    let first = write(&outbox, &events(1)).await;
    db.tamper(Tamper::Age { event_id: &first[0], by: 100 * DAY }).await;
    let node = node(&db, Mode::SingleNode).await;
    settle(&node, &claim(&node, 1).await[0], Disposition::Done).await;
    node.close().await.unwrap();
    let ids = one_of_each(&db, &outbox).await;
    assert_eq!(outbox.purge().await.unwrap(), 0);
    for id in &ids {
        db.tamper(Tamper::Age { event_id: id, by: DAY }).await;
    }
    assert_eq!(outbox.purge().await.unwrap(), 1);
    assert_eq!(left(&outbox, &ids).await, [New, Retry, Dead]);
    for id in [&ids[0], &ids[2], &ids[3]] {
        db.tamper(Tamper::Age { event_id: id, by: DAY }).await;
    }
    assert_eq!(outbox.purge().await.unwrap(), 1);
    assert_eq!(left(&outbox, &ids).await, [New, Retry], "what is pending never goes");
    assert_eq!(left(&outbox, &first).await, [Done]);
    outbox.close().await;
}

async fn m2_everything_goes_by_the_time_of_its_insert<H: Harness>(db: H) {
    let keep = Retention { done: None, everything: Some(DAY), ..Retention::default() };
    let outbox = keeping(&db, keep, 1).await;
    let ids = one_of_each(&db, &outbox).await;
    assert_eq!(outbox.purge().await.unwrap(), 0);
    for id in &ids[..3] {
        db.tamper(Tamper::Age { event_id: id, by: DAY }).await;
    }
    assert_eq!(outbox.purge().await.unwrap(), 3, "new, done and to be tried again");
    assert_eq!(left(&outbox, &ids).await, [OutboxStatus::Dead], "the young one");
    outbox.close().await;
}

async fn m3_a_purge_has_a_limit_and_counts<H: Harness>(db: H) {
    let name = TableName::new("purged").unwrap();
    let calls = Calls::default();
    let outbox = outbox(&db, &calls, |builder| builder.table("purged")).await;
    let ids = write(&outbox, &events(5)).await;
    all_done(&outbox, &ids).await;
    outbox.close().await;
    let store = db.pool().await.open(name, Mode::SingleNode).await.unwrap();
    assert_eq!(store.purge(Purge::Dead, Duration::ZERO, 3).await.unwrap(), 0);
    assert_eq!(store.purge(Purge::Done, Duration::ZERO, 3).await.unwrap(), 3);
    assert_eq!(left(&outbox, &ids).await.len(), 2);
    assert_eq!(store.purge(Purge::Done, Duration::ZERO, 3).await.unwrap(), 2);
    assert_eq!(store.purge(Purge::Done, Duration::ZERO, 3).await.unwrap(), 0);
    assert!(TableName::new("purged; DROP TABLE x").is_err());
}

async fn m4_purging_goes_on_batch_by_batch_and_from_time_to_time<H: Harness>(db: H) {
    let calls = Calls::default();
    let dispatcher = outbox(&db, &calls, |builder| builder).await;
    let events: Vec<Event> = events(1_500);
    write(&dispatcher, &events).await;
    until("all are done", async || dispatcher.table().store().oldest_due().await.unwrap().is_none()).await;
    dispatcher.close().await;

    let (pool, book) = watched(&db).await;
    let keep = Retention { done: Some(Duration::ZERO), interval: Duration::from_millis(50), ..Retention::default() };
    let outbox = Outbox::new(pool).mode(Mode::WriterOnly).purge(keep).start().await.unwrap();
    until("it has come again", async || book.calls("purge").len() >= 5).await;
    outbox.close().await;
    assert!(book.calls("purge").iter().all(|limit| *limit == 500), "{:?}", book.calls("purge"));
    let writer = writer(&db).await;
    for event in [&events[0], &events[749], &events[1_499]] {
        assert!(writer.find(event.id()).await.unwrap().is_none());
    }
    assert!(row(&writer, &write(&writer, &crate::harness::events(1)).await[0]).await.done_at.is_none());

    // A failing time does not end the schedule.
    let (pool, book) = watched(&db).await;
    let keep = Retention { interval: Duration::from_millis(10), ..Retention::default() };
    book.refuse("purge", 2);
    let outbox = Outbox::new(pool).mode(Mode::WriterOnly).purge(keep).start().await.unwrap();
    until("it goes on", async || book.calls("purge").len() >= 4).await;
    outbox.close().await;
}

#[tokio::test]
async fn m4_a_retention_has_defaults_and_makes_sense() {
    let defaults = Retention::default();
    assert_eq!((defaults.done, defaults.dead, defaults.everything), (Some(7 * DAY), None, None));
    assert_eq!((defaults.batch_size, defaults.interval), (500, Duration::from_secs(3_600)));
    for (name, retention) in [
        ("purge.batch_size", Retention { batch_size: 0, ..Retention::default() }),
        ("purge.interval", Retention { interval: Duration::ZERO, ..Retention::default() }),
    ] {
        let settings = Settings { mode: Mode::WriterOnly, purge: Some(retention), ..Settings::default() };
        let refused = Outbox::new(posthaste_testing::MemoryDatabase::new()).settings(settings).start().await;
        assert!(matches!(refused.err(), Some(StartError::Setting(bad)) if bad.setting() == name));
    }
}
