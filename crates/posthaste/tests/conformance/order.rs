//! The order of the events of one aggregate: which row blocks which, and that no row stays blocked for ever.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthaste::{DeadFilter, DeadHead, Event, Mode, OutboxStatus, Pool, TableName};
use posthaste_core::outbox::{OperatorStore, OutboxSource, Purge, Reader, Store, Table};
use posthaste_core::{Disposition, Settled, Source};

use crate::harness::{
    DAY, Database, HOUR, Harness, LEASE, Memory, PATIENCE, Tamper, claim, claimed_ids, dispatcher, failure, is_idle,
    named, node, on_every_database, on_every_server, on_every_store, retry, settle, settle_all, watched, write,
    write_to, writer,
};

on_every_store! {
    an_event_without_a_key_waits_for_no_other_event,
}

on_every_database! {
    a_dead_head_blocks_its_key_or_is_skipped,
    rows_behind_a_head_are_blocked_until_it_is_done,
    rows_behind_a_deleted_head_are_unblocked,
    rows_behind_a_purged_dead_head_are_unblocked,
    order_survives_failures_on_three_nodes_while_events_are_written,
}

on_every_server! {
    every_row_that_a_claim_blocks_is_checked,
}

fn of_key(id: &str, key: &str) -> Event {
    Event::text("t", "{}").id(id.to_owned()).aggregate("order", key).build().unwrap()
}

/// The rows that claims skip because they are blocked by another row.
async fn blocked<H: Database>(db: &H) -> Vec<String> {
    db.texts("SELECT event_id FROM outbox_event WHERE blocked ORDER BY seq").await
}

async fn rows_behind_a_head_are_blocked_until_it_is_done<H: Database>(db: H) {
    let (one, other) = (node(&db, Mode::ORDERED).await, node(&db, Mode::ORDERED).await);
    write(&writer(&db).await, &["a1", "b1", "a2", "a3", "b2"].map(|id| of_key(id, &id[..1]))).await;
    let head = claim(&one, 1).await;
    assert_eq!(claimed_ids(&head), ["a1"]);
    assert_eq!(
        claimed_ids(&claim(&other, 10).await),
        ["b1", "b2"],
        "a whole run of one key, and no row of the blocked key"
    );
    assert_eq!(blocked(&db).await, ["a2", "a3"]);
    assert!(is_idle(&other.claim(10).await.unwrap()));

    // A failed head waits for its retry, and no row of its key passes it.
    settle(&one, &head[0], retry(HOUR)).await;
    assert!(claim(&other, 10).await.is_empty());
    db.execute("UPDATE outbox_event SET available_at = created_at WHERE event_id = 'a1'").await;
    let head = claim(&other, 10).await;
    assert_eq!((claimed_ids(&head), head[0].attempt), (vec!["a1".to_owned()], 2));
    settle(&other, &head[0], Disposition::Done).await;
    assert!(blocked(&db).await.is_empty());
    assert_eq!(claimed_ids(&claim(&one, 10).await), ["a2", "a3"]);
}

/// A claim that finds nothing after its scan position starts again at the head, and both may have blocked rows.
async fn every_row_that_a_claim_blocks_is_checked<H: Database>(db: H) {
    let (pool, call_log) = watched(&db).await;
    let store = pool.open(TableName::default(), Mode::ORDERED).await.unwrap();
    let node = Table::open(store, Reader::Dispatcher, LEASE).await.unwrap().dispatcher_source();
    write(&writer(&db).await, &["1", "2", "3", "4"].map(|id| of_key(id, "k"))).await;
    assert_eq!(claimed_ids(&claim(&node, 2).await), ["1", "2"]);
    assert!(claim(&node, 3).await.is_empty(), "the rest waits for the first two");
    assert_eq!(blocked(&db).await, ["3", "4"]);
    assert_eq!(call_log.calls("unlocked_unfinished"), [2], "each row is blocked by the one before");
}

async fn a_dead_head_blocks_its_key_or_is_skipped<H: Database>(db: H) {
    drop(db);
    for (dead_head, next) in [(DeadHead::Block, &[][..]), (DeadHead::Skip, &["2", "3"])] {
        let db = H::start().await;
        let table = dispatcher(&db, Mode::Ordered(dead_head)).await;
        let (store, node) = (table.store(), table.dispatcher_source());
        write_to(&table, &["1", "2", "3"].map(|id| of_key(id, "k"))).await;
        let head = claim(&node, 1).await;
        assert!(claim(&node, 10).await.is_empty());
        settle(&node, &head[0], Disposition::Dead(failure())).await;
        assert!(store.oldest_due().await.unwrap().is_some());
        assert_eq!(store.oldest_unblocked().await.unwrap().is_some(), !next.is_empty());
        assert_eq!(claimed_ids(&claim(&node, 10).await), next);
        if dead_head == DeadHead::Skip {
            continue;
        }
        // An operator replays the dead head. It goes dead again, and the operator discards it.
        assert_eq!(store.replay(&DeadFilter::all(), i64::MIN, 10).await.unwrap().0, 1);
        let again = claim(&node, 10).await;
        assert_eq!((claimed_ids(&again), again[0].attempt), (vec!["1".to_owned()], 1));
        settle(&node, &again[0], Disposition::Dead(failure())).await;
        assert!(claim(&node, 10).await.is_empty());
        assert!(store.discard("1").await.unwrap());
        assert_eq!(claimed_ids(&claim(&node, 10).await), ["2", "3"]);
    }
}

async fn rows_behind_a_deleted_head_are_unblocked<H: Database>(db: H) {
    let late = Event::text("t", "{}").id("1".to_owned()).aggregate("order", "k").deliver_after(HOUR).build().unwrap();
    write(&writer(&db).await, &[late, of_key("2", "k")]).await;
    assert!(claim(&node(&db, Mode::ORDERED).await, 10).await.is_empty());
    assert_eq!(blocked(&db).await, ["2"]);
    db.execute("DELETE FROM outbox_event WHERE event_id = '1'").await;
    // A new process looks for such rows at its start, a running one within a minute.
    assert_eq!(claimed_ids(&claim(&node(&db, Mode::ORDERED).await, 10).await), ["2"]);
}

async fn rows_behind_a_purged_dead_head_are_unblocked<H: Database>(db: H) {
    let table = dispatcher(&db, Mode::ORDERED).await;
    let (store, node) = (table.store(), table.dispatcher_source());
    write_to(&table, &["1", "2"].map(|id| of_key(id, "k"))).await;
    settle(&node, &claim(&node, 1).await[0], Disposition::Dead(failure())).await;
    assert!(claim(&node, 10).await.is_empty());
    assert_eq!(blocked(&db).await, ["2"]);
    db.tamper(Tamper::Age { event_id: "1", by: 9 * DAY }).await;
    assert_eq!(store.purge(Purge::Dead, 7 * DAY, 10).await.unwrap(), 1);
    assert_eq!(claimed_ids(&claim(&node, 10).await), ["2"]);
}

async fn an_event_without_a_key_waits_for_no_other_event<H: Harness>(db: H) {
    write(&writer(&db).await, &["1", "2"].map(named)).await;
    let node = node(&db, Mode::ORDERED).await;
    assert_eq!(claimed_ids(&claim(&node, 1).await), ["1"]);
    assert_eq!(claimed_ids(&claim(&node, 1).await), ["2"]);
}

const KEYS: u32 = 20;
const EVENTS: u32 = 100;

/// The numbers of the delivered events of each key, in order, with repetitions.
type Delivered = Arc<Mutex<HashMap<String, Vec<u32>>>>;

/// Delivers as a relay does: the items of a key one after the other, and no further item of the key after a failure.
async fn drain<S: Store>(node: OutboxSource<S>, delivered: Delivered, chance: u64) {
    let mut chance = fastrand::Rng::with_seed(chance);
    loop {
        let items = claim(&node, 60).await;
        if items.is_empty() {
            let done: usize = delivered.lock().unwrap().values().map(Vec::len).sum();
            if done >= (KEYS * EVENTS) as usize {
                return;
            }
            tokio::task::yield_now().await;
            continue;
        }
        let (mut settled, mut released, mut failed) = (Vec::new(), Vec::new(), Vec::new());
        for claimed in &items {
            let key = claimed.item.event.aggregate_id().unwrap().to_owned();
            if failed.contains(&key) {
                released.push(claimed);
            } else if chance.f64() < 0.1 {
                failed.push(key);
                settled.push((claimed, retry(Duration::ZERO)));
            } else {
                let number = String::from_utf8_lossy(claimed.item.event.payload().as_bytes()).parse().unwrap();
                delivered.lock().unwrap().entry(key).or_default().push(number);
                settled.push((claimed, Disposition::Done));
            }
        }
        // A row that another statement has locked at that moment is settled again, as a relay does.
        while !settled.is_empty() {
            let mut answers = settle_all(&node, &settled).await.into_iter();
            settled.retain(|_| answers.next() == Some(Settled::Locked));
        }
        node.release(&released).await.unwrap();
    }
}

async fn three_nodes_keep_the_order<H: Harness>(db: &H) {
    let delivered = Delivered::default();
    let mut nodes = Vec::new();
    for chance in 0..3 {
        nodes.push(tokio::spawn(drain(node(db, Mode::ORDERED).await, delivered.clone(), chance)));
    }
    let table = dispatcher(db, Mode::ORDERED).await;
    for number in 0..EVENTS {
        let event = |key| Event::text("t", number.to_string()).aggregate("order", key).build().unwrap();
        write_to(&table, &(0..KEYS).map(event).collect::<Vec<_>>()).await;
    }
    // A settlement that finds a row locked for long leaves it to the next sweep, which comes within a minute.
    for node in nodes {
        tokio::time::timeout(4 * PATIENCE, node).await.expect("every node ends").unwrap();
    }
    let delivered = std::mem::take(&mut *delivered.lock().unwrap());
    assert_eq!(delivered.len(), KEYS as usize);
    for (key, numbers) in &delivered {
        assert_eq!(*numbers, (0..EVENTS).collect::<Vec<_>>(), "order of {key}");
    }
}

async fn order_survives_failures_on_three_nodes_while_events_are_written<H: Database>(db: H) {
    three_nodes_keep_the_order(&db).await;
    let left = db.texts("SELECT event_id FROM outbox_event WHERE status <> 1 OR blocked").await;
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn order_survives_failures_on_three_nodes_in_memory() {
    let db = Memory::start().await;
    three_nodes_keep_the_order(&db).await;
    assert!(db.0.rows("outbox_event").iter().all(|row| row.status == OutboxStatus::Done));
}
