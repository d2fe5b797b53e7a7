//! Row leases: how the rows of a crashed process are claimed again, and how a row that crashes processes is found.

use std::collections::HashMap;
use std::time::Duration;

use posthaste::{Event, InTransaction, Mode, Outbox, OutboxStatus, Pool, TableName};
use posthaste_core::outbox::roles::*;
use posthaste_core::outbox::{ClaimRequest, OperatorStore, OutboxSource, Purge, Reader, SUSPECT_GROUP, Store, Table};
use posthaste_core::{Disposition, Settled, Source};

use crate::harness::{
    Calls, Database, HOUR, Harness, LEASE, PATIENCE, Tamper, all_done, claim, claimed_ids, dispatcher, event_of, named,
    node, on_every_server, on_every_store, retry, row, settle, settle_all, until, watched, write, write_plain,
    write_to, writer, writer_of,
};

on_every_store! {
    rows_of_a_crashed_node_are_claimed_in_groups_of_suspects,
    only_a_row_that_crashes_four_processes_goes_dead,
    a_lease_lost_before_its_delivery_started_is_not_counted,
    a_claim_whose_answer_was_lost_is_released_before_its_lease_ends,
    a_lease_from_before_the_clock_was_set_back_is_ignored,
    an_owner_from_before_the_clock_was_set_back_is_replaced,
    next_due_is_the_end_of_another_nodes_lease,
    a_finished_attempt_clears_the_suspicion,
    a_process_does_not_reclaim_its_own_rows_after_a_clock_jump,
    nodes_that_drain_together_deliver_everything_once,
}

on_every_server! {
    a_claim_skips_locked_rows,
    a_locked_row_does_not_block_other_settlements_or_renewals,
}

/// Ages these rows by an hour, so that their leases have expired.
async fn an_hour_passes<H: Harness>(db: &H, ids: &[&str]) {
    for event_id in ids {
        db.tamper(Tamper::Age { event_id, by: HOUR }).await;
    }
}

async fn rows_of_a_crashed_node_are_claimed_in_groups_of_suspects<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids: Vec<String> = (0..SUSPECT_GROUP * 2 + 52).map(|number| format!("{number:03}")).collect();
    let all: Vec<&str> = ids.iter().map(String::as_str).collect();
    write(&outbox, &all.iter().map(|id| named(id)).collect::<Vec<_>>()).await;
    let (lost, fresh) = all.split_at(all.len() - 2);
    let died = node(&db, Mode::MultiNode).await;
    assert_eq!(claimed_ids(&claim(&died, lost.len()).await), lost);
    an_hour_passes(&db, lost).await;

    let one = node(&db, Mode::MultiNode).await;
    let first = one.claim(500).await.unwrap();
    assert_eq!(claimed_ids(&first.items), lost[..SUSPECT_GROUP], "a group of suspects");
    assert_eq!(first.next_due, Some(Duration::ZERO), "more rows are due");
    assert_eq!(claimed_ids(&claim(&one, 500).await), fresh, "no second group while one is in flight");
    assert!(claim(&one, 500).await.is_empty());
    // Another node may have a group of its own in flight.
    let other = node(&db, Mode::MultiNode).await;
    let second = claim(&other, 500).await;
    assert_eq!(claimed_ids(&second), lost[SUSPECT_GROUP..2 * SUSPECT_GROUP]);

    let (last, others) = first.items.split_last().unwrap();
    let settled: Vec<_> = others.iter().map(|item| (item, Disposition::Done)).collect();
    assert!(settle_all(&one, &settled).await.iter().all(|answer| *answer == Settled::Applied));
    assert!(claim(&one, 500).await.is_empty(), "one of the group is still in flight");
    assert_eq!(settle(&one, last, Disposition::Done).await, Settled::Applied);
    let woken = tokio::time::timeout(PATIENCE, one.wakeup().signalled()).await;
    assert!(woken.is_ok(), "the source is woken for the next group");
    let rest = claim(&one, 500).await;
    assert_eq!(claimed_ids(&rest), lost[2 * SUSPECT_GROUP..]);
    one.release(&rest.iter().collect::<Vec<_>>()).await.unwrap();
    assert_eq!(row(&outbox, lost[2 * SUSPECT_GROUP]).await.lease_losses, 1, "a release is not a lost lease");
    assert_eq!(row(&outbox, fresh[0]).await.lease_losses, 0);
}

async fn only_a_row_that_crashes_four_processes_goes_dead<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let both = ["killer", "innocent"];
    write(&outbox, &both.map(named)).await;
    // Claimed among many rows, then in a group of suspects, then alone, then alone once more.
    for expected in [&both[..], &both[..], &both[..1], &both[..1]] {
        let items = claim(&node(&db, Mode::MultiNode).await, 10).await;
        assert_eq!(claimed_ids(&items), expected);
        assert!(items.iter().all(|claimed| claimed.attempt == 1), "a lost lease does not count as an attempt");
        an_hour_passes(&db, &both).await;
    }
    let node = node(&db, Mode::MultiNode).await;
    let last_claim = node.claim(10).await.unwrap();
    assert!(last_claim.items.is_empty() && last_claim.next_due == Some(Duration::ZERO));
    let killer = row(&outbox, "killer").await;
    assert_eq!((killer.status, killer.attempts, killer.lease_losses), (OutboxStatus::Dead, 0, 4));
    assert!(killer.done_at.is_some() && killer.last_error.unwrap().starts_with("lease_lost: "));
    let innocent = claim(&node, 10).await;
    assert_eq!(claimed_ids(&innocent), ["innocent"]);
    assert_eq!(settle(&node, &innocent[0], Disposition::Done).await, Settled::Applied);
    assert_eq!(row(&outbox, "innocent").await.lease_losses, 2);
}

/// The answers of several claims are lost, and their processes cannot release them. No process delivered the event.
async fn a_lease_lost_before_its_delivery_started_is_not_counted<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    write(&outbox, &[named("1")]).await;
    let store = db.pool().await.open(TableName::default(), Mode::MultiNode).await.unwrap();
    for number in 0..6 {
        let claim_id = format!("lost:{number}");
        let request = ClaimRequest {
            event_type: None,
            in_flight: &[],
            limit: 10,
            after: None,
            claim_id: &claim_id,
            lease: LEASE,
            allow_suspects: true,
            skip_recent: Duration::ZERO,
        };
        assert_eq!(store.claim(&request).await.unwrap().rows.len(), 1);
        an_hour_passes(&db, &["1"]).await;
    }
    let node = node(&db, Mode::MultiNode).await;
    let claimed = claim(&node, 10).await;
    assert_eq!((claimed_ids(&claimed), row(&outbox, "1").await.lease_losses), (vec!["1".to_owned()], 1));
    assert_eq!(settle(&node, &claimed[0], Disposition::Done).await, Settled::Applied);
}

async fn a_claim_whose_answer_was_lost_is_released_before_its_lease_ends<H: Harness>(db: H) {
    for mode in [Mode::MultiNode, Mode::ORDERED] {
        let (pool, call_log) = watched(&db).await;
        call_log.lose_answers("claim", 2);
        let calls = Calls::default();
        let table = format!("lost_{}", mode.word());
        let builder = Outbox::new(pool).mode(mode).table(&table).listeners(calls.listeners());
        let outbox = builder.poll_interval(Duration::from_millis(100)).start().await.unwrap();
        let ids = write_plain(&db, &writer_of(&db, &table).await, &[event_of("1"), event_of("2"), event_of("1")]).await;
        calls.wait_for(3).await;
        assert_eq!(call_log.lost_answers("claim"), 0, "the answers of two claims were lost");
        all_done(&outbox, &ids).await;
        for id in &ids {
            assert_eq!(row(&outbox, id).await.lease_losses, 0, "{mode:?}");
        }
        outbox.close().await;
        assert_eq!(calls.len(), 3, "once each");
    }
}

/// A node claims the rows of a crashed node when their leases end, not at the next poll. An idle table needs no poll.
async fn next_due_is_the_end_of_another_nodes_lease<H: Harness>(db: H) {
    for mode in [Mode::MultiNode, Mode::ORDERED] {
        let table = format!("ends_{}", mode.word());
        let outbox = writer_of(&db, &table).await;
        let open = async || {
            let store = db.pool().await.open(TableName::new(&table).unwrap(), mode).await.unwrap();
            Table::open(store, Reader::Dispatcher, LEASE).await.unwrap().dispatcher_source()
        };
        let (died, other) = (open().await, open().await);
        assert_eq!(other.claim(10).await.unwrap().next_due, None, "{mode:?}: the table is empty");
        write(&outbox, &[named("1")]).await;
        let claimed = claim(&died, 10).await;
        assert_eq!(claimed.len(), 1);
        let next = other.claim(10).await.unwrap().next_due.expect("the lease ends");
        assert!((LEASE / 2..=LEASE).contains(&next), "{mode:?}: {next:?}");
        assert_eq!(died.claim(10).await.unwrap().next_due, None, "{mode:?}: its own lease is renewed");
        assert_eq!(settle(&died, &claimed[0], Disposition::Done).await, Settled::Applied);
        assert_eq!(other.claim(10).await.unwrap().next_due, None, "{mode:?}: everything is done");
    }
}

async fn a_lease_from_before_the_clock_was_set_back_is_ignored<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    write(&outbox, &[named("1")]).await;
    let died = node(&db, Mode::MultiNode).await;
    assert_eq!(claim(&died, 1).await.len(), 1);
    db.tamper(Tamper::SetClockBack { by: HOUR }).await;
    let other = node(&db, Mode::MultiNode).await;
    assert_eq!(claimed_ids(&claim(&other, 10).await), ["1"], "claimed by another node at once");
    assert!(claim(&node(&db, Mode::MultiNode).await, 10).await.is_empty(), "the new lease is valid");
}

async fn an_owner_from_before_the_clock_was_set_back_is_replaced<H: Harness>(db: H) {
    write(&writer(&db).await, &[named("1")]).await;
    let died = node(&db, Mode::SingleNode).await;
    assert_eq!(claim(&died, 1).await.len(), 1);
    let other = node(&db, Mode::SingleNode).await;
    assert!(claim(&other, 10).await.is_empty(), "the table has an owner");
    db.tamper(Tamper::SetClockBack { by: HOUR }).await;
    assert_eq!(claimed_ids(&claim(&other, 10).await), ["1"], "another node owns the table at once");
    assert!(claim(&node(&db, Mode::SingleNode).await, 10).await.is_empty(), "the new ownership is valid");
}

async fn a_finished_attempt_clears_the_suspicion<H: Harness>(db: H) {
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
    assert_eq!(claimed_ids(&claim(&node, 10).await), ["2", "1"], "claimed together with other rows");
}

async fn a_process_does_not_reclaim_its_own_rows_after_a_clock_jump<H: Harness>(db: H) {
    write(&writer(&db).await, &[named("1")]).await;
    let node = node(&db, Mode::MultiNode).await;
    let claimed = claim(&node, 10).await;
    an_hour_passes(&db, &["1"]).await;
    assert!(claim(&node, 10).await.is_empty());
    assert_eq!(node.renew(&[&claimed[0]]).await.unwrap(), [Settled::Applied]);
    assert_eq!(settle(&node, &claimed[0], Disposition::Done).await, Settled::Applied);
}

async fn a_claim_skips_locked_rows<H: Database>(db: H) {
    write(&writer(&db).await, &["1", "2"].map(named)).await;
    let node = node(&db, Mode::MultiNode).await;
    // A long transaction of an operator changes a row.
    let mut operator = H::begin_plain(&db.pool().await).await;
    let update = "UPDATE outbox_event SET available_at = available_at WHERE event_id = '1'";
    H::execute_on(operator.connection(), update).await;
    assert_eq!(claimed_ids(&claim(&node, 10).await), ["2"]);
    H::commit_plain(operator).await;
    assert_eq!(claimed_ids(&claim(&node, 10).await), ["1"]);
}

/// A long transaction of an operator blocks the settlement of the row that it locked, and of no other row.
async fn a_locked_row_does_not_block_other_settlements_or_renewals<H: Database>(db: H) {
    for mode in [Mode::MultiNode, Mode::ORDERED] {
        let table = format!("locked_{}", mode.word());
        let outbox = writer_of(&db, &table).await;
        write(&outbox, &["1", "2", "3"].map(named)).await;
        let store = db.pool().await.open(TableName::new(&table).unwrap(), mode).await.unwrap();
        let node = Table::open(store, Reader::Dispatcher, LEASE).await.unwrap().dispatcher_source();
        let claimed = claim(&node, 10).await;
        let mut operator = H::begin_plain(&db.pool().await).await;
        let update = format!("UPDATE {table} SET available_at = available_at WHERE event_id = '2'");
        H::execute_on(operator.connection(), &update).await;
        let all: Vec<_> = claimed.iter().collect();
        let expected = [Settled::Applied, Settled::Locked, Settled::Applied];
        assert_eq!(node.renew(&all).await.unwrap(), expected, "{mode:?}");
        let done: Vec<_> = claimed.iter().map(|claimed| (claimed, Disposition::Done)).collect();
        assert_eq!(settle_all(&node, &done).await, expected, "{mode:?}");
        H::commit_plain(operator).await;
        assert_eq!(settle(&node, &claimed[1], Disposition::Done).await, Settled::Applied, "{mode:?}");
    }
}

/// Claims and settles until no row is left, and returns the ids of the delivered events.
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

/// Counts deliveries, not distinct events.
async fn nodes_that_drain_together_deliver_everything_once<H: Harness>(db: H) {
    let table = dispatcher(&db, Mode::MultiNode).await;
    let events: Vec<Event> = (0..3_600).map(|number: usize| named(&number.to_string())).collect();
    let (early, late) = events.split_at(3_000);
    write_to(&table, early).await;
    let mut nodes = Vec::new();
    for _ in 0..3 {
        nodes.push(tokio::spawn(drain(node(&db, Mode::MultiNode).await)));
    }
    // The service writes while the nodes drain the table.
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
