//! Row leases: what a process that died leaves behind, and how the row that kills processes is found.

use std::collections::HashMap;
use std::time::Duration;

use posthaste::{Event, InTransaction, Mode, OutboxStatus};
use posthaste_core::outbox::{OutboxSource, Purge, Store, Upkeep};
use posthaste_core::{Disposition, Settled, Source};

use crate::harness::{
    Database, HOUR, Harness, Tamper, claim, claimed_ids, dispatcher, named, node, on_every_server, on_every_store,
    retry, row, settle, settle_all, until, write, write_to, writer,
};

on_every_store! {
    suspects_are_claimed_one_by_one_and_apart_from_others,
    a_row_that_ends_three_processes_goes_dead,
    an_attempt_that_came_to_an_end_clears_the_suspicion,
    what_this_process_holds_it_does_not_claim_again_when_the_databases_clock_jumps,
    nodes_that_drain_together_deliver_everything_once,
}

on_every_server! {
    a_claim_waits_for_nobody,
}

/// Lets the leases of these rows have ended long ago.
async fn an_hour_passes<H: Harness>(db: &H, ids: &[&str]) {
    for event_id in ids {
        db.tamper(Tamper::Age { event_id, by: HOUR }).await;
    }
}

async fn suspects_are_claimed_one_by_one_and_apart_from_others<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let all = ["1", "2", "3", "4", "5"];
    write(&outbox, &all.map(named)).await;
    let died = node(&db, Mode::MultiNode).await;
    assert_eq!(claimed_ids(&claim(&died, 3).await), all[..3]);
    an_hour_passes(&db, &all).await;

    let one = node(&db, Mode::MultiNode).await;
    let first = one.claim(10).await.unwrap();
    assert_eq!(claimed_ids(&first.items), ["1"], "alone");
    assert_eq!(first.next_due, Some(Duration::ZERO), "there is more");
    assert_eq!(claimed_ids(&claim(&one, 10).await), ["4", "5"], "no second suspect while one is in flight");
    assert!(claim(&one, 10).await.is_empty());
    // Another node may have one of its own.
    let other = node(&db, Mode::MultiNode).await;
    let second = claim(&other, 10).await;
    assert_eq!(claimed_ids(&second), ["2"]);
    assert_eq!(settle(&other, &second[0], Disposition::Done).await, Settled::Applied);

    assert_eq!(settle(&one, &first.items[0], Disposition::Done).await, Settled::Applied);
    let woken = tokio::time::timeout(Duration::from_secs(5), one.wakeup().signalled()).await;
    assert!(woken.is_ok(), "the next suspect may come");
    let last = claim(&one, 10).await;
    assert_eq!(claimed_ids(&last), ["3"]);
    one.release(&[&last[0]]).await.unwrap();
    assert_eq!(claimed_ids(&claim(&other, 10).await), ["3"], "released at once, and still a suspect");
    assert_eq!(row(&outbox, "3").await.lease_losses, 1, "a clean release is no loss");
    assert_eq!(row(&outbox, "4").await.lease_losses, 0);
}

async fn a_row_that_ends_three_processes_goes_dead<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let both = ["killer", "innocent"];
    write(&outbox, &both.map(named)).await;
    for expected in [&both[..], &both[..1], &both[..1]] {
        let items = claim(&node(&db, Mode::MultiNode).await, 10).await;
        assert_eq!(claimed_ids(&items), expected);
        assert!(items.iter().all(|claimed| claimed.attempt == 1), "losses are no attempts");
        an_hour_passes(&db, &both).await;
    }
    let node = node(&db, Mode::MultiNode).await;
    let buried = node.claim(10).await.unwrap();
    assert!(buried.items.is_empty() && buried.next_due == Some(Duration::ZERO));
    let killer = row(&outbox, "killer").await;
    assert_eq!((killer.status, killer.attempts, killer.lease_losses), (OutboxStatus::Dead, 0, 3));
    assert!(killer.done_at.is_some() && killer.last_error.unwrap().starts_with("lease_lost: "));
    let innocent = claim(&node, 10).await;
    assert_eq!(claimed_ids(&innocent), ["innocent"]);
    assert_eq!(settle(&node, &innocent[0], Disposition::Done).await, Settled::Applied);
    assert_eq!(row(&outbox, "innocent").await.lease_losses, 1);
}

async fn an_attempt_that_came_to_an_end_clears_the_suspicion<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    write(&outbox, &["1", "2"].map(named)).await;
    let died = node(&db, Mode::MultiNode).await;
    assert_eq!(claimed_ids(&claim(&died, 1).await), ["1"]);
    an_hour_passes(&db, &["1"]).await;
    let node = node(&db, Mode::MultiNode).await;
    let suspect = claim(&node, 10).await;
    assert_eq!((claimed_ids(&suspect), row(&outbox, "1").await.lease_losses), (vec!["1".to_owned()], 1));
    assert_eq!(settle(&node, &suspect[0], retry(Duration::ZERO)).await, Settled::Applied);
    assert_eq!(row(&outbox, "1").await.lease_losses, 0);
    assert_eq!(claimed_ids(&claim(&node, 10).await), ["2", "1"], "together with others");
}

async fn what_this_process_holds_it_does_not_claim_again_when_the_databases_clock_jumps<H: Harness>(db: H) {
    write(&writer(&db).await, &[named("1")]).await;
    let node = node(&db, Mode::MultiNode).await;
    let held = claim(&node, 10).await;
    an_hour_passes(&db, &["1"]).await;
    assert!(claim(&node, 10).await.is_empty());
    assert_eq!(node.renew(&[&held[0]]).await.unwrap(), [Settled::Applied]);
    assert_eq!(settle(&node, &held[0], Disposition::Done).await, Settled::Applied);
}

async fn a_claim_waits_for_nobody<H: Database>(db: H) {
    write(&writer(&db).await, &["1", "2"].map(named)).await;
    let node = node(&db, Mode::MultiNode).await;
    // An operator's transaction that changes a row and takes its time.
    let mut operator = H::begin_plain(&db.pool().await).await;
    let update = "UPDATE outbox_event SET available_at = available_at WHERE event_id = '1'";
    H::execute_on(operator.parts().0, update).await;
    assert_eq!(claimed_ids(&claim(&node, 10).await), ["2"]);
    H::commit_plain(operator).await;
    assert_eq!(claimed_ids(&claim(&node, 10).await), ["1"]);
}

/// Claims and settles until there is nothing left; answers with what was delivered.
async fn drain<S: Store>(node: OutboxSource<S>) -> Vec<String> {
    let mut seen = Vec::new();
    loop {
        let claim = node.claim(70).await.unwrap();
        if claim.items.is_empty() && claim.next_due.is_none() {
            return seen;
        }
        assert!(claim.items.is_sorted_by_key(|claimed| claimed.item.seq), "in order");
        for items in claim.items.chunks(30) {
            let done: Vec<_> = items.iter().map(|claimed| (claimed, Disposition::Done)).collect();
            let answers = settle_all(&node, &done).await;
            assert!(answers.iter().all(|answer| *answer == Settled::Applied));
        }
        seen.extend(claimed_ids(&claim.items));
    }
}

/// Every delivery is counted, not every distinct event.
async fn nodes_that_drain_together_deliver_everything_once<H: Harness>(db: H) {
    let table = dispatcher(&db, Mode::MultiNode).await;
    let events: Vec<Event> = (0..3_600).map(|number: usize| named(&number.to_string())).collect();
    let (early, late) = events.split_at(3_000);
    write_to(&table, early).await;
    let mut nodes = Vec::new();
    for _ in 0..3 {
        nodes.push(tokio::spawn(drain(node(&db, Mode::MultiNode).await)));
    }
    // While they drain, the service writes.
    for events in late.chunks(7) {
        write_to(&table, events).await;
    }
    let mut deliveries: HashMap<String, usize> = HashMap::new();
    let mut count = |ids: Vec<String>| ids.into_iter().for_each(|id| *deliveries.entry(id).or_default() += 1);
    for node in nodes {
        count(node.await.unwrap());
    }
    count(drain(node(&db, Mode::MultiNode).await).await);
    assert_eq!(deliveries.len(), events.len());
    assert!(deliveries.values().all(|count| *count == 1));
    let done = std::cell::Cell::new(0);
    until("all are done", async || {
        done.set(done.get() + table.store().purge(Purge::Done, Duration::ZERO, events.len()).await.unwrap());
        done.get() == events.len() as u64
    })
    .await;
}
