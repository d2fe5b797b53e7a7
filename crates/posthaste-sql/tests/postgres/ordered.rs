//! The events of one aggregate, in their order: who waits for whom, and that nobody waits for ever.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthaste_core::outbox::{DeadFilter, DeadHead, Mode, OutboxStatus, Upkeep};
use posthaste_core::{Claimed, Disposition, Event, Failure, Settlement, Source};

use crate::support::{Outbox, OutboxSource, Postgres, ids, is_idle, settle};

fn of_key(id: &str, key: &str) -> Event {
    Event::text("t", "{}").id(id.to_owned()).aggregate("order", key).build().unwrap()
}

async fn parked(postgres: &Postgres) -> Option<String> {
    postgres.ask("SELECT string_agg(event_id, ' ' ORDER BY seq) FROM outbox_event WHERE parked").await
}

fn retry(after: Duration) -> Disposition {
    Disposition::Retry { after, counted: true, failure: Some(Failure::transient("503", "busy")) }
}

#[tokio::test]
async fn what_waits_is_parked_and_comes_back_when_its_head_is_done() {
    let postgres = Postgres::start().await;
    let (one, other) = (postgres.dispatcher(Mode::ORDERED).await, postgres.dispatcher(Mode::ORDERED).await);
    let (one, other) = (one.dispatcher_source(), other.dispatcher_source());
    let writer = postgres.dispatcher(Mode::ORDERED).await;
    let events = ["a1", "b1", "a2", "a3", "b2"].map(|id| of_key(id, &id[..1]));
    postgres.write(&writer, &events).await;
    let head = one.claim(1).await.unwrap().items;
    assert_eq!(ids(&head), ["a1"]);
    let rest = other.claim(10).await.unwrap().items;
    assert_eq!(ids(&rest), ["b1", "b2"], "a whole run, and nothing of the other key");
    assert_eq!(parked(&postgres).await.as_deref(), Some("a2 a3"));
    assert!(is_idle(&other.claim(10).await.unwrap()));

    // A failing head waits alone; nobody passes it.
    settle(&one, &head[0], retry(Duration::from_secs(3_600))).await;
    assert!(other.claim(10).await.unwrap().items.is_empty());
    postgres.execute("UPDATE outbox_event SET available_at = now() WHERE event_id = 'a1'").await;
    let head = other.claim(10).await.unwrap().items;
    assert_eq!((ids(&head), head[0].attempt), (vec!["a1"], 2));
    settle(&other, &head[0], Disposition::Done).await;
    assert_eq!(parked(&postgres).await, None);
    assert_eq!(ids(&one.claim(10).await.unwrap().items), ["a2", "a3"]);
}

#[tokio::test]
async fn a_dead_head_blocks_or_is_passed() {
    for (dead_head, passes) in [(DeadHead::Block, false), (DeadHead::Skip, true)] {
        let postgres = Postgres::start().await;
        let outbox = postgres.dispatcher(Mode::Ordered(dead_head)).await;
        let source = outbox.dispatcher_source();
        postgres.write(&outbox, &["1", "2", "3"].map(|id| of_key(id, "k"))).await;
        let items = source.claim(1).await.unwrap().items;
        assert!(source.claim(10).await.unwrap().items.is_empty());
        settle(&source, &items[0], Disposition::Dead(Failure::permanent("410", "gone"))).await;
        let next = source.claim(10).await.unwrap().items;
        assert_eq!(ids(&next), if passes { vec!["2", "3"] } else { vec![] });
        if passes {
            continue;
        }
        // An operator replays it, it dies again, and is discarded.
        assert_eq!(outbox.store().replay(&DeadFilter::all(), i64::MIN, 10).await.unwrap().0, 1);
        let again = source.claim(10).await.unwrap().items;
        assert_eq!((ids(&again), again[0].attempt), (vec!["1"], 1));
        settle(&source, &again[0], Disposition::Dead(Failure::permanent("410", "gone"))).await;
        assert!(source.claim(10).await.unwrap().items.is_empty());
        assert!(outbox.store().discard("1").await.unwrap());
        assert_eq!(ids(&source.claim(10).await.unwrap().items), ["2", "3"]);
    }
}

#[tokio::test]
async fn a_row_that_somebody_else_finished_holds_nobody_up_for_good() {
    let postgres = Postgres::start().await;
    let outbox = postgres.dispatcher(Mode::ORDERED).await;
    postgres.write(&outbox, &["1", "2"].map(|id| of_key(id, "k"))).await;
    postgres.execute("UPDATE outbox_event SET available_at = now() + interval '1 hour' WHERE event_id = '1'").await;
    assert!(outbox.dispatcher_source().claim(10).await.unwrap().items.is_empty());
    assert_eq!(parked(&postgres).await.as_deref(), Some("2"));
    postgres.execute("DELETE FROM outbox_event WHERE event_id = '1'").await;
    // The next process looks for such rows at once, this one within a minute.
    let next = postgres.dispatcher(Mode::ORDERED).await;
    assert_eq!(ids(&next.dispatcher_source().claim(10).await.unwrap().items), ["2"]);
}

#[tokio::test]
async fn an_unordered_event_waits_for_nobody() {
    let postgres = Postgres::start().await;
    let outbox = postgres.dispatcher(Mode::ORDERED).await;
    let source = outbox.dispatcher_source();
    let free = |id: &str| Event::text("t", "{}").id(id.to_owned()).build().unwrap();
    postgres.write(&outbox, &[free("1"), free("2")]).await;
    assert_eq!(ids(&source.claim(1).await.unwrap().items), ["1"]);
    assert_eq!(ids(&source.claim(1).await.unwrap().items), ["2"]);
}

/// What was delivered of each key, in order, with repetitions.
type Delivered = Arc<Mutex<HashMap<String, Vec<u32>>>>;

/// Delivers as a relay would: the items of a key one after the other, and nothing of it after a failure.
async fn drain(source: OutboxSource, delivered: Delivered, total: usize, chance: u64) {
    let mut chance = fastrand::Rng::with_seed(chance);
    loop {
        let claim = source.claim(60).await.unwrap();
        if claim.items.is_empty() {
            let done: usize = delivered.lock().unwrap().values().map(Vec::len).sum();
            if done >= total {
                return;
            }
            tokio::task::yield_now().await;
            continue;
        }
        let (mut settled, mut released, mut failed): (Vec<_>, Vec<&Claimed<_>>, Vec<String>) = Default::default();
        for claimed in &claim.items {
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
        let settlements = settled.iter();
        let settlements: Vec<_> = settlements
            .map(|(claimed, disposition)| Settlement { claimed, disposition, took: Duration::ZERO })
            .collect();
        source.settle(&settlements).await.unwrap();
        source.release(&released).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_survives_failures_on_three_nodes_while_events_are_written() {
    const KEYS: u32 = 20;
    const EVENTS: u32 = 100;
    let postgres = Postgres::start().await;
    let delivered = Delivered::default();
    let mut nodes = Vec::new();
    for node in 0..3 {
        let source = postgres.dispatcher(Mode::ORDERED).await.dispatcher_source();
        let total = (KEYS * EVENTS) as usize;
        nodes.push(tokio::spawn(drain(source, delivered.clone(), total, node)));
    }
    let outbox: Outbox = postgres.dispatcher(Mode::ORDERED).await;
    for number in 0..EVENTS {
        let events = (0..KEYS).map(|key| Event::text("t", number.to_string()).aggregate("order", key).build().unwrap());
        postgres.write(&outbox, &events.collect::<Vec<_>>()).await;
    }
    for node in nodes {
        tokio::time::timeout(Duration::from_secs(60), node).await.expect("nobody waits for ever").unwrap();
    }
    let delivered = delivered.lock().unwrap().clone();
    assert_eq!(delivered.len(), KEYS as usize);
    for (key, numbers) in delivered.iter() {
        assert_eq!(*numbers, (0..EVENTS).collect::<Vec<_>>(), "of {key}");
    }
    let undone = "SELECT count(*) FROM outbox_event WHERE status <> 1 OR parked";
    assert_eq!(postgres.ask::<i64>(undone).await, 0);
    assert!(outbox.find("nobody").await.unwrap().is_none_or(|row| row.status == OutboxStatus::Done));
}
