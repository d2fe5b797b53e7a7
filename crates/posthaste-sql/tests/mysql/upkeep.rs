//! What operators do with an outbox.

use std::time::Duration;

use posthaste_core::outbox::{DeadFilter, Mode, OutboxStatus, Purge, Upkeep};
use posthaste_core::{Disposition, Event, Failure, Source};

use crate::support::{MODES, MySql, event, ids, settle};

const WEEK: Duration = Duration::from_secs(7 * 24 * 60 * 60);

#[tokio::test]
async fn dead_events_are_listed_replayed_and_discarded() {
    for mode in MODES {
        let mysql = MySql::start().await;
        let outbox = mysql.dispatcher(mode).await;
        let (store, source) = (outbox.store(), outbox.dispatcher_source());
        let mut events = vec![event("done", "a", "{}"), event("1", "a", "{}"), event("2", "b", "{}")];
        events.push(Event::text("b", "{}").id("3".to_owned()).aggregate("order", "x").build().unwrap());
        mysql.write(&outbox, &events).await;
        let items = source.claim(10).await.unwrap().items;
        settle(&source, &items[0], Disposition::Done).await;
        for claimed in &items[1..] {
            settle(&source, claimed, Disposition::Dead(Failure::permanent("410", "gone"))).await;
        }
        mysql.execute("UPDATE outbox_event SET attempts = 4, lease_losses = 2 WHERE status = 3").await;
        let (all, of_b) = (DeadFilter::all(), DeadFilter::all().event_type("b"));
        let one = DeadFilter { event_id: Some("3".to_owned()), ..DeadFilter::all().aggregate_type("order") };
        let listed = |rows: Vec<posthaste_core::outbox::OutboxRow>| {
            rows.into_iter().map(|row| row.event_id).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(listed(store.dead(&all, 10).await.unwrap()), "1 2 3");
        assert_eq!(listed(store.dead(&all, 2).await.unwrap()), "1 2");
        assert_eq!(listed(store.dead(&of_b, 10).await.unwrap()), "2 3");
        assert_eq!(listed(store.dead(&one, 10).await.unwrap()), "3");
        for (filter, count) in [(&all, 3), (&of_b, 2), (&one, 1), (&of_b.clone().event_type("c"), 0)] {
            assert_eq!(store.count_dead(filter).await.unwrap(), count);
        }
        assert!(source.claim(10).await.unwrap().items.is_empty());

        let (replayed, last) = store.replay(&of_b, i64::MIN, 1).await.unwrap();
        assert_eq!((replayed, store.find("2").await.unwrap().unwrap().seq), (1, last));
        let row = store.find("2").await.unwrap().unwrap();
        assert_eq!((row.status, row.attempts, row.lease_losses), (OutboxStatus::New, 0, 0));
        assert!(row.done_at.is_none() && row.last_error.is_none());
        assert_eq!(store.replay(&of_b, last, 10).await.unwrap().0, 1);
        assert_eq!(store.replay(&of_b, i64::MIN, 10).await.unwrap().0, 0);
        assert_eq!(ids(&source.claim(10).await.unwrap().items), ["2", "3"]);

        assert!(!store.discard("done").await.unwrap() && !store.discard("2").await.unwrap());
        assert!(store.discard("1").await.unwrap() && !store.discard("1").await.unwrap());
        assert!(store.find("1").await.unwrap().is_none());
    }
}

#[tokio::test]
async fn a_purge_deletes_what_is_old_and_finished_in_batches() {
    for mode in MODES {
        let mysql = MySql::start().await;
        let outbox = mysql.dispatcher(mode).await;
        let store = outbox.store();
        mysql
            .execute(
                "INSERT INTO outbox_event (event_id, event_type, payload, status, created_at, done_at) VALUES
                     ('pending', 't', '', 0, UTC_TIMESTAMP() - INTERVAL 30 DAY, NULL),
                     ('done1', 't', '', 1, UTC_TIMESTAMP() - INTERVAL 30 DAY, UTC_TIMESTAMP() - INTERVAL 29 DAY),
                     ('late', 't', '', 1, UTC_TIMESTAMP() - INTERVAL 29 DAY, UTC_TIMESTAMP()),
                     ('done2', 't', '', 1, UTC_TIMESTAMP() - INTERVAL 9 DAY, NULL),
                     ('dead', 't', '', 3, UTC_TIMESTAMP() - INTERVAL 9 DAY, UTC_TIMESTAMP() - INTERVAL 8 DAY),
                     ('done3', 't', '', 1, UTC_TIMESTAMP() - INTERVAL 8 DAY, UTC_TIMESTAMP() - INTERVAL 8 DAY),
                     ('young', 't', '', 1, UTC_TIMESTAMP(), UTC_TIMESTAMP()),
                     ('young-dead', 't', '', 3, UTC_TIMESTAMP(), UTC_TIMESTAMP())",
            )
            .await;
        let left = || async {
            let left = "SELECT GROUP_CONCAT(event_id ORDER BY seq SEPARATOR ' ') FROM outbox_event";
            mysql.ask::<Option<String>>(left).await.unwrap_or_default()
        };
        assert_eq!(store.purge(Purge::Done, WEEK, 2).await.unwrap(), 2);
        assert_eq!(left().await, "pending late dead done3 young young-dead");
        assert_eq!(store.purge(Purge::Done, WEEK, 2).await.unwrap(), 1);
        assert_eq!(store.purge(Purge::Done, WEEK, 2).await.unwrap(), 0);
        assert_eq!(store.purge(Purge::Dead, WEEK, 10).await.unwrap(), 1);
        assert_eq!(left().await, "pending late young young-dead");
        assert_eq!(store.purge(Purge::Everything, WEEK, 10).await.unwrap(), 2);
        assert_eq!(left().await, "young young-dead");
    }
}

#[tokio::test]
async fn what_waits_behind_a_purged_dead_head_goes_on() {
    let mysql = MySql::start().await;
    let outbox = mysql.dispatcher(Mode::ORDERED).await;
    let source = outbox.dispatcher_source();
    let events = ["1", "2"].map(|id| Event::text("t", "{}").id(id.to_owned()).aggregate("order", "k").build().unwrap());
    mysql.write(&outbox, &events).await;
    let items = source.claim(1).await.unwrap().items;
    settle(&source, &items[0], Disposition::Dead(Failure::permanent("410", "gone"))).await;
    assert!(source.claim(10).await.unwrap().items.is_empty());
    mysql.execute("UPDATE outbox_event SET created_at = created_at - INTERVAL 9 DAY, done_at = created_at").await;
    assert_eq!(outbox.store().purge(Purge::Dead, WEEK, 10).await.unwrap(), 1);
    assert_eq!(ids(&source.claim(10).await.unwrap().items), ["2"]);
}

#[tokio::test]
async fn the_oldest_due_event_has_an_age() {
    let mysql = MySql::start().await;
    let outbox = mysql.dispatcher(Mode::MultiNode).await;
    assert_eq!(outbox.store().oldest_due().await.unwrap(), None);
    mysql.write(&outbox, &[event("1", "t", "{}")]).await;
    mysql.execute("UPDATE outbox_event SET available_at = available_at - INTERVAL 1 HOUR").await;
    let age = outbox.store().oldest_due().await.unwrap().unwrap();
    assert!(age >= Duration::from_secs(3_600) && age < Duration::from_secs(3_700), "{age:?}");
}
