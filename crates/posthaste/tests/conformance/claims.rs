//! F: the rows that a claim returns.

use posthaste_core::outbox::roles::*;
use std::collections::HashMap;
use std::time::Duration;

use chrono::{TimeDelta, Utc};
use posthaste::{Event, Mode};
use posthaste_core::{Disposition, Settled, Source};

use crate::harness::{
    HOUR, Harness, LEASE, MODES, RowSettler, Tamper, claim, claimed_ids, event, events, failure, node, on_every_store,
    retry, row, settle, snooze, until, write, writer,
};
use crate::store::{full_event, is_about};

on_every_store! {
    f1_only_due_and_pending_rows_are_claimed,
    f2_a_claim_is_in_order_and_within_its_limit,
    f3_a_row_is_not_claimed_before_it_is_due,
    f4_two_nodes_never_claim_the_same_row,
    f5_an_expired_lease_is_claimed_by_another_node,
    f6_a_settlement_ends_the_lease,
    f7_concurrent_claims_never_share_a_row,
    f8_an_event_is_read_back_as_it_was_written,
}

async fn f1_only_due_and_pending_rows_are_claimed<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids = write(&outbox, &events(6)).await;
    let settler = RowSettler::of(&db).await;
    let ends = [Disposition::Done, Disposition::Dead(failure()), retry(HOUR), snooze(HOUR), retry(Duration::ZERO)];
    for (id, end) in ids.iter().zip(&ends) {
        assert!(settler.settle(row(&outbox, id).await.seq, end).await);
    }
    settler.store.release_ownership("me").await.unwrap();
    let node = node(&db, Mode::SingleNode).await;
    let mut claimed = claimed_ids(&claim(&node, 10).await);
    claimed.sort();
    assert_eq!(claimed, ids[4..], "the retry that is due and the new row");
}

async fn f2_a_claim_is_in_order_and_within_its_limit<H: Harness>(db: H) {
    drop(db);
    for mode in MODES {
        let db = H::start().await;
        let outbox = writer(&db).await;
        let due = |ago: i64| {
            let event = Event::text("t", "{}").occurred_at(Utc::now() - TimeDelta::hours(10));
            event.available_at(Utc::now() - TimeDelta::hours(ago)).build().unwrap()
        };
        let ids = write(&outbox, &[event(), due(1), event(), due(3), due(2), event()]).await;
        let in_order = [3, 4, 1, 0, 2, 5].map(|at: usize| ids[at].clone());
        let node = node(&db, mode).await;
        let mut claimed = Vec::new();
        for _ in 0..3 {
            let batch = claimed_ids(&claim(&node, 2).await);
            assert_eq!(batch.len(), 2);
            claimed.extend(batch);
        }
        assert_eq!(claimed, in_order, "{mode:?}");
    }
}

async fn f3_a_row_is_not_claimed_before_it_is_due<H: Harness>(db: H) {
    drop(db);
    for mode in [Mode::SingleNode, Mode::MultiNode] {
        let db = H::start().await;
        let outbox = writer(&db).await;
        let young = node(&db, mode).await.skip_recent(HOUR);
        let fresh = write(&outbox, &events(1)).await;
        assert!(claim(&young, 10).await.is_empty(), "younger than skip_recent");
        db.tamper(Tamper::Age { event_id: &fresh[0], by: HOUR }).await;
        let claimed = claim(&young, 10).await;
        assert_eq!(claimed_ids(&claimed), fresh);
        settle(&young, &claimed[0], Disposition::Done).await;
        young.close().await.unwrap();

        let node = node(&db, mode).await;
        let wait = Duration::from_millis(500);
        let both = write(&outbox, &events(2)).await;
        let claimed = claim(&node, 10).await;
        assert_eq!(claimed_ids(&claimed), both);
        let began = tokio::time::Instant::now();
        settle(&node, &claimed[0], retry(wait)).await;
        settle(&node, &claimed[1], snooze(wait)).await;
        let delayed = Event::text("t", "{}").deliver_after(wait).build().unwrap();
        write(&outbox, std::slice::from_ref(&delayed)).await;
        let early = claim(&node, 10).await;
        assert!(early.is_empty() || began.elapsed() > wait * 9 / 10, "claimed too early");
        let mut seen = claimed_ids(&early);
        while seen.len() < 3 {
            tokio::time::sleep(Duration::from_millis(10)).await;
            seen.extend(claimed_ids(&claim(&node, 10).await));
            assert!(began.elapsed() < Duration::from_secs(20), "{seen:?}");
        }
        seen.sort();
        let mut expected = [both, vec![delayed.id().to_owned()]].concat();
        expected.sort();
        assert_eq!(seen, expected);
    }
}

async fn f4_two_nodes_never_claim_the_same_row<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids = write(&outbox, &events(3)).await;
    let (first, second) = (node(&db, Mode::MultiNode).await, node(&db, Mode::MultiNode).await);
    assert_eq!(claimed_ids(&claim(&first, 2).await), ids[..2]);
    assert_eq!(claimed_ids(&claim(&second, 10).await), ids[2..]);
    let mut owners = Vec::new();
    for id in &ids {
        let row = row(&outbox, id).await;
        assert!(is_about(row.locked_at.unwrap(), Utc::now()));
        owners.push(row.locked_by.unwrap());
    }
    assert!(owners[0] == owners[1] && owners[1] != owners[2], "{owners:?}");
}

async fn f5_an_expired_lease_is_claimed_by_another_node<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids = write(&outbox, &events(1)).await;
    let (first, second) = (node(&db, Mode::MultiNode).await, node(&db, Mode::MultiNode).await);
    let stale = claim(&first, 1).await;
    let old_owner = row(&outbox, &ids[0]).await.locked_by;
    assert!(claim(&second, 1).await.is_empty());
    db.tamper(Tamper::Age { event_id: &ids[0], by: LEASE }).await;
    let reclaimed = claim(&second, 1).await;
    assert_eq!((claimed_ids(&reclaimed), reclaimed[0].attempt), (ids.clone(), 1));
    let row = row(&outbox, &ids[0]).await;
    assert!(row.locked_by.is_some() && row.locked_by != old_owner);
    assert_eq!((row.attempts, row.lease_losses), (0, 1));
    assert_eq!(settle(&first, &stale[0], Disposition::Done).await, Settled::LostLease);
    assert_eq!(settle(&second, &reclaimed[0], Disposition::Done).await, Settled::Applied);
}

async fn f6_a_settlement_ends_the_lease<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids = write(&outbox, &events(5)).await;
    let node = node(&db, Mode::MultiNode).await;
    let claimed = claim(&node, 5).await;
    let ends = [Disposition::Done, retry(HOUR), snooze(HOUR), Disposition::Dead(failure())];
    for (claimed, end) in claimed.iter().zip(ends) {
        assert_eq!(settle(&node, claimed, end).await, Settled::Applied);
    }
    node.release(&[&claimed[4]]).await.unwrap();
    for id in &ids {
        let row = row(&outbox, id).await;
        assert!(row.locked_by.is_none() && row.locked_at.is_none(), "{row:?}");
    }
}

async fn f7_concurrent_claims_never_share_a_row<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    write(&outbox, &events(200)).await;
    let mut nodes = Vec::new();
    for _ in 0..3 {
        nodes.push(node(&db, Mode::MultiNode).await);
    }
    let claims = nodes.into_iter().map(|node| {
        tokio::spawn(async move {
            let mut ids = Vec::new();
            loop {
                match claimed_ids(&claim(&node, 7).await) {
                    none if none.is_empty() => return ids,
                    some => ids.extend(some),
                }
            }
        })
    });
    let mut counts: HashMap<String, usize> = HashMap::new();
    for claims in claims.collect::<Vec<_>>() {
        claims.await.unwrap().into_iter().for_each(|id| *counts.entry(id).or_default() += 1);
    }
    assert!(counts.values().all(|count| *count == 1));
    // A claim skips rows that another claim has locked at that moment, so a node may have stopped too early.
    let last = node(&db, Mode::MultiNode).await;
    let rest = std::cell::Cell::new(200 - counts.len());
    until("everything is claimed", async || {
        rest.set(rest.get() - claim(&last, 200).await.len());
        rest.get() == 0
    })
    .await;
    assert!(counts.len() > 100, "only {} rows were claimed concurrently", counts.len());
}

async fn f8_an_event_is_read_back_as_it_was_written<H: Harness>(db: H) {
    drop(db);
    for mode in [Mode::SingleNode, Mode::MultiNode] {
        let db = H::start().await;
        let outbox = writer(&db).await;
        let written = full_event("{ \"a\": 1 }");
        write(&outbox, std::slice::from_ref(&written)).await;
        let node = node(&db, mode).await;
        let claimed = claim(&node, 1).await;
        assert!(*claimed[0].item.event == written);
        assert!(!claimed[0].item.event.is_delayed());
        settle(&node, &claimed[0], retry(Duration::ZERO)).await;
        let claimed = claim(&node, 1).await;
        assert_eq!(claimed[0].attempt, 2);
        assert!(*claimed[0].item.event == written, "unchanged after a retry, which moved available_at");
        assert_eq!(claimed[0].item.created_at, row(&outbox, written.id()).await.created_at);
    }
}
