//! What operators ask and do, in every mode.

use std::time::Duration;

use posthaste::{DeadFilter, Event, Mode, OutboxStatus};
use posthaste_core::Disposition;
use posthaste_core::outbox::{OperatorStore, Purge};

use crate::harness::{
    DAY, Database, HOUR, MODES, claim, claimed_ids, dispatcher, failure, on_every_database, row, settle, write_to,
    writer,
};

on_every_database! {
    the_dead_are_listed_counted_replayed_and_discarded,
    what_is_finished_and_old_is_purged_and_nothing_else,
    the_age_of_the_oldest_is_that_of_what_is_due,
}

fn of(id: &str, event_type: &str, aggregate_type: &str) -> Event {
    Event::text(event_type, "{}").id(id.to_owned()).aggregate(aggregate_type, id).build().unwrap()
}

async fn the_dead_are_listed_counted_replayed_and_discarded<H: Database>(db: H) {
    drop(db);
    for mode in MODES {
        let db = H::start().await;
        let outbox = writer(&db).await;
        let table = dispatcher(&db, mode).await;
        let (store, node) = (table.store(), table.dispatcher_source());
        let types =
            [("1", "a", "x"), ("2", "b", "x"), ("3", "a", "y"), ("4", "a", "x"), ("done", "a", "x"), ("5", "a", "x")];
        write_to(&table, &types.map(|(id, event_type, aggregate_type)| of(id, event_type, aggregate_type))).await;
        let items = claim(&node, 5).await;
        settle(&node, &items[4], Disposition::Done).await;
        for claimed in &items[..4] {
            settle(&node, claimed, Disposition::Dead(failure())).await;
        }
        db.execute("UPDATE outbox_event SET attempts = 4, lease_losses = 2 WHERE status = 3").await;
        let (all, a) = (DeadFilter::all(), DeadFilter::all().event_type("a"));
        let one = DeadFilter { event_id: Some("3".to_owned()), ..DeadFilter::all().aggregate_type("y") };
        let listed = async |filter: &DeadFilter, limit| {
            let rows = store.dead(filter, limit).await.unwrap();
            rows.into_iter().map(|row| row.event_id).collect::<Vec<_>>()
        };
        assert_eq!(listed(&all, 10).await, ["1", "2", "3", "4"]);
        assert_eq!(listed(&all, 2).await, ["1", "2"]);
        assert_eq!(listed(&a, 10).await, ["1", "3", "4"]);
        assert_eq!(listed(&a.clone().aggregate_type("x"), 10).await, ["1", "4"]);
        assert_eq!(listed(&one, 10).await, ["3"]);
        let (x, nobody) = (DeadFilter::all().aggregate_type("x"), DeadFilter::all().event_type("nobody"));
        for (filter, count) in [(&all, 4), (&a, 3), (&x, 3), (&one, 1), (&nobody, 0)] {
            assert_eq!(store.count_dead(filter).await.unwrap(), count);
        }
        assert_eq!(claimed_ids(&claim(&node, 10).await), ["5"], "nothing that is dead");

        let (count, last) = store.replay(&a, i64::MIN, 2).await.unwrap();
        assert_eq!((count, last), (2, row(&outbox, "3").await.seq));
        assert_eq!(listed(&all, 10).await, ["2", "4"]);
        let first = row(&outbox, "1").await;
        assert_eq!((first.status, first.attempts, first.lease_losses), (OutboxStatus::New, 0, 0));
        assert!(first.done_at.is_none() && first.last_error.is_none());
        assert_eq!(store.replay(&a, last, 2).await.unwrap().0, 1);
        assert_eq!(store.replay(&a, i64::MIN, 10).await.unwrap().0, 0);
        assert_eq!(claimed_ids(&claim(&node, 10).await), ["1", "3", "4"]);

        for alive in ["done", "1", "nobody"] {
            assert!(!store.discard(alive).await.unwrap(), "only what is dead");
        }
        assert!(store.discard("2").await.unwrap() && !store.discard("2").await.unwrap());
        assert!(store.find("2").await.unwrap().is_none());
    }
}

async fn what_is_finished_and_old_is_purged_and_nothing_else<H: Database>(db: H) {
    drop(db);
    for mode in MODES {
        let db = H::start().await;
        let table = dispatcher(&db, mode).await;
        let [now, eight, nine, month] = [0, 8, 9, 30].map(|days| H::ago(days * DAY));
        db.execute(&format!(
            "INSERT INTO outbox_event (event_id, event_type, payload, status, created_at, done_at) VALUES
                 ('pending', 't', '', 0, {month}, NULL),
                 ('done1', 't', '', 1, {month}, {nine}),
                 ('late', 't', '', 1, {month}, {now}),
                 ('done2', 't', '', 1, {nine}, NULL),
                 ('dead1', 't', '', 3, {nine}, {eight}),
                 ('late-dead', 't', '', 3, {nine}, {now}),
                 ('dead2', 't', '', 3, {nine}, NULL),
                 ('done3', 't', '', 1, {eight}, {eight}),
                 ('young', 't', '', 1, {now}, {now}),
                 ('young-dead', 't', '', 3, {now}, {now})"
        ))
        .await;
        let purge = async |which, days: u32, limit| table.store().purge(which, days * DAY, limit).await.unwrap();
        let left = async || db.texts("SELECT event_id FROM outbox_event ORDER BY seq").await.join(" ");
        assert_eq!(purge(Purge::Done, 10, 10).await, 0);
        assert_eq!(purge(Purge::Done, 7, 2).await, 2);
        assert_eq!(left().await, "pending late dead1 late-dead dead2 done3 young young-dead");
        assert_eq!(purge(Purge::Done, 7, 2).await, 1);
        assert_eq!(purge(Purge::Done, 7, 2).await, 0);
        assert_eq!(purge(Purge::Dead, 7, 1).await, 1);
        assert_eq!(purge(Purge::Dead, 7, 10).await, 1);
        assert_eq!(purge(Purge::Dead, 7, 10).await, 0, "the others died today");
        assert_eq!(left().await, "pending late late-dead young young-dead");
        assert_eq!(purge(Purge::Everything, 7, 2).await, 2);
        assert_eq!(purge(Purge::Everything, 7, 2).await, 1);
        assert_eq!(purge(Purge::Everything, 7, 2).await, 0);
        assert_eq!(left().await, "young young-dead");
    }
}

async fn the_age_of_the_oldest_is_that_of_what_is_due<H: Database>(db: H) {
    let table = dispatcher(&db, Mode::SingleNode).await;
    let oldest_due = async || table.store().oldest_due().await.unwrap();
    assert_eq!(oldest_due().await, None);
    write_to(&table, &[Event::text("t", "{}").deliver_after(HOUR).build().unwrap()]).await;
    assert_eq!(oldest_due().await, None);
    let ago = H::ago(HOUR);
    db.execute(&format!("INSERT INTO outbox_event (event_type, payload, available_at) VALUES ('t', '{{}}', {ago})"))
        .await;
    let age = oldest_due().await.unwrap();
    assert!(age >= HOUR && age < HOUR + Duration::from_secs(60), "{age:?}");
}
