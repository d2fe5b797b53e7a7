//! I: claims that exclude each other, the backoff of retries, and the routing of events to listeners.

use std::time::Duration;

use posthaste::{Event, Listeners, Mode, Outbox, RegistrationError, RetryPolicy, Settings, StartError};
use posthaste_core::outbox::{OutboxItem, Unroutable};
use posthaste_core::{Claimed, Delivery, Outcome, Sink, Source};

use crate::harness::{Harness, LEASE, Tamper, claim, claimed_ids, events, node, on_every_store, write, writer};

on_every_store! {
    i1_a_claimed_row_is_not_claimed_again_until_it_is_released,
    i2_a_claim_lasts_one_lease,
}

async fn i1_a_claimed_row_is_not_claimed_again_until_it_is_released<H: Harness>(db: H) {
    for mode in [Mode::SingleNode, Mode::MultiNode] {
        let db = if mode == Mode::SingleNode { &db } else { &H::start().await };
        let ids = write(&writer(db).await, &events(2)).await;
        let node = node(db, mode).await;
        let first = claim(&node, 1).await;
        assert_eq!(claimed_ids(&first), ids[..1]);
        let second = claim(&node, 10).await;
        assert_eq!(claimed_ids(&second), ids[1..], "only the row that is not claimed");
        assert!(claim(&node, 10).await.is_empty());
        node.release(&[&first[0]]).await.unwrap();
        let again = claim(&node, 10).await;
        assert_eq!(claimed_ids(&again), ids[..1]);
        node.release(&[&first[0]]).await.unwrap();
        assert!(claim(&node, 10).await.is_empty(), "a claim cannot release a row that another claim has");
    }
}

async fn i2_a_claim_lasts_one_lease<H: Harness>(db: H) {
    let ids = write(&writer(&db).await, &events(1)).await;
    let (first, second) = (node(&db, Mode::MultiNode).await, node(&db, Mode::MultiNode).await);
    assert_eq!(claimed_ids(&claim(&first, 1).await), ids);
    db.tamper(Tamper::Age { event_id: &ids[0], by: LEASE / 2 }).await;
    assert!(claim(&second, 1).await.is_empty());
    db.tamper(Tamper::Age { event_id: &ids[0], by: LEASE / 2 }).await;
    assert_eq!(claimed_ids(&claim(&second, 1).await), ids);
    let no_lease = Settings { lease: Duration::ZERO, mode: Mode::MultiNode, ..Settings::default() };
    let listeners = Listeners::new().on("t", |_| async {}).unwrap();
    let refused = Outbox::new(db.pool().await).settings(no_lease).listeners(listeners).start().await;
    assert!(matches!(refused.err(), Some(StartError::Setting(bad)) if bad.setting() == "lease"));
}

#[test]
fn i3_backoff_doubles_with_jitter_up_to_its_maximum() {
    let policy = RetryPolicy::default();
    let (base, max) = (Duration::from_millis(200), Duration::from_secs(60));
    assert_eq!(policy, RetryPolicy::Exponential { base, max, max_attempts: Some(10) });
    assert_eq!(policy.delay(0, 0.5), Duration::ZERO);
    for (attempt, middle) in [(1, 200), (2, 400), (3, 800), (8, 25_600)] {
        let middle = Duration::from_millis(middle);
        assert_eq!(policy.delay(attempt, 0.5), middle);
        assert_eq!(policy.delay(attempt, 0.0), middle / 2);
        assert!(policy.delay(attempt, 0.999_999) < middle * 3 / 2);
    }
    for attempt in [31, 32, 50, 100, u32::MAX] {
        assert_eq!(policy.delay(attempt, 0.0), max / 2);
        assert_eq!(policy.delay(attempt, 0.999), max, "capped again after the jitter");
    }
}

#[tokio::test]
async fn i3_a_backoff_of_zero_is_refused() {
    for (base, max) in [(Duration::ZERO, Duration::from_secs(1)), (Duration::from_secs(1), Duration::ZERO)] {
        let retry = RetryPolicy::Exponential { base, max, max_attempts: Some(1) };
        let database = posthaste_testing::MemoryDatabase::new();
        let refused = Outbox::new(database).retry(retry).on("t", |_| async {}).start().await;
        assert!(matches!(refused.err(), Some(StartError::Setting(bad)) if bad.setting().starts_with("retry.")));
    }
}

/// The outcome of an event that these listeners get.
async fn outcome(listeners: &Listeners, event: Event) -> Outcome {
    let (delivery, outcome) = Delivery::detached(Claimed::new(OutboxItem::detached(event), 1, 0));
    listeners.clone().into_sink(Unroutable::Dead, None, "posthaste").deliver(vec![delivery]).await;
    outcome.await.unwrap()
}

#[tokio::test]
async fn i4_each_pair_of_types_has_one_listener() {
    let listeners = Listeners::new().on("e", |_| async {}).unwrap();
    let listeners = listeners.on_aggregate("a:b", "c", |_| async {}).unwrap();
    let listeners =
        listeners.on_aggregate("a", "b:c", |_| async { Outcome::Snoozed { wait: Duration::ZERO } }).unwrap();
    let duplicate = listeners.clone().on_aggregate("__GLOBAL__", "e", |_| async {}).err().unwrap();
    let (aggregate_type, event_type) = ("__GLOBAL__".to_owned(), "e".to_owned());
    assert_eq!(duplicate, RegistrationError::Duplicate { aggregate_type, event_type });
    let event =
        |aggregate: &str, event_type: &str| Event::text(event_type, "{}").aggregate_type(aggregate).build().unwrap();
    assert_eq!(outcome(&listeners, event("__GLOBAL__", "e")).await, Outcome::Delivered);
    assert_eq!(outcome(&listeners, event("a:b", "c")).await, Outcome::Delivered);
    assert_eq!(outcome(&listeners, event("a", "b:c")).await, Outcome::Snoozed { wait: Duration::ZERO });
    let Outcome::Failed(failure) = outcome(&listeners, event("a", "e")).await else { panic!("no listener matches") };
    assert_eq!(failure.code, "unroutable");
    assert_eq!(Listeners::new().on("", |_| async {}).err(), Some(RegistrationError::EmptyType));
}
