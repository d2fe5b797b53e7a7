//! K: events from the write to the delivery.

use std::time::Duration;

use posthaste::{Delay, Event, Failure, Mode, Outbox, OutboxStatus, RetryPolicy};

use crate::harness::{Calls, Harness, Metrics, all_back, event, on_every_store, outbox, row_when, write};

on_every_store! {
    k1_a_rollback_leaves_no_row,
    k2_a_commit_is_delivered_by_the_hot_path,
    k3_events_beyond_a_full_hot_queue_are_polled,
    k4_a_failing_listener_ends_in_a_dead_event,
    k5_each_event_of_a_batch_is_delivered_once,
    k6_a_delayed_event_waits_and_is_polled,
    k7_no_connection_stays_in_use,
}

async fn k1_a_rollback_leaves_no_row<H: Harness>(db: H) {
    let calls = Calls::default();
    let outbox = outbox(&db, &calls, |builder| builder).await;
    let (rolled_back, dropped) = (event(), event());
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write(&mut transaction, &rolled_back).await.unwrap();
    transaction.rollback().await.unwrap();
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write(&mut transaction, &dropped).await.unwrap();
    drop(transaction);
    let last = write(&outbox, &[event()]).await;
    calls.wait_for(1).await;
    outbox.close().await;
    assert_eq!(calls.ids(), last);
    for gone in [rolled_back, dropped] {
        assert!(outbox.find(gone.id()).await.unwrap().is_none());
    }
}

async fn k2_a_commit_is_delivered_by_the_hot_path<H: Harness>(db: H) {
    for mode in [Mode::SingleNode, Mode::MultiNode] {
        let (calls, metrics) = (Calls::default(), Metrics::default());
        let table = format!("hot_{}", mode.word());
        let listening = metrics.listening();
        let outbox = outbox(&db, &calls, |builder| builder.mode(mode).table(table)).await;
        drop(listening);
        let written = event();
        write(&outbox, std::slice::from_ref(&written)).await;
        calls.wait_for(1).await;
        let row = row_when(&outbox, written.id(), |row| row.status == OutboxStatus::Done).await;
        let enqueued = |path: &str| metrics.counter(&format!("posthaste_enqueue_{path}_total"));
        assert_eq!((enqueued("hot"), enqueued("cold")), (1, 0));
        assert!(row.done_at.is_some() && row.locked_by.is_none() && row.locked_at.is_none());
        assert_eq!((row.attempts, calls.ids()), (0, vec![written.id().to_owned()]));
        outbox.close().await;
    }
}

async fn k3_events_beyond_a_full_hot_queue_are_polled<H: Harness>(db: H) {
    let calls = Calls::default();
    let settings = posthaste::Settings { hot_queue: 1, ..Default::default() };
    let outbox = outbox(&db, &calls, |builder| builder.settings(settings)).await;
    let events: Vec<Event> = (0..20).map(|_| event()).collect();
    write(&outbox, &events).await;
    calls.wait_for(20).await;
    for event in &events {
        row_when(&outbox, event.id(), |row| row.status == OutboxStatus::Done).await;
    }
    outbox.close().await;
    assert_eq!(calls.ids().len(), 20);
}

async fn k4_a_failing_listener_ends_in_a_dead_event<H: Harness>(db: H) {
    let calls = Calls::default();
    let retry = RetryPolicy::Fixed { interval: Duration::from_millis(20), max_attempts: Some(3) };
    let seen = calls.clone();
    let builder = Outbox::new(db.pool().await).retry(retry).on("t", move |event| {
        seen.add(event);
        async { Err::<(), _>(Failure::transient("503", "the mail server is down")) }
    });
    let outbox = builder.start().await.unwrap();
    let ids = write(&outbox, &[event()]).await;
    let row = row_when(&outbox, &ids[0], |row| row.status == OutboxStatus::Dead).await;
    outbox.close().await;
    assert_eq!(calls.ids().len(), 3);
    assert_eq!(row.last_error.as_deref(), Some("503: the mail server is down"));
    assert!(row.done_at.is_some() && row.locked_by.is_none());
}

async fn k5_each_event_of_a_batch_is_delivered_once<H: Harness>(db: H) {
    let calls = Calls::default();
    let outbox = outbox(&db, &calls, |builder| builder).await;
    let events = [event(), event(), event()];
    let ids = write(&outbox, &events).await;
    assert_eq!(ids, events.each_ref().map(Event::id));
    for id in &ids {
        row_when(&outbox, id, |row| row.status == OutboxStatus::Done).await;
    }
    outbox.close().await;
    assert_eq!(calls.counts(), ids.into_iter().map(|id| (id, 1)).collect());
}

async fn k6_a_delayed_event_waits_and_is_polled<H: Harness>(db: H) {
    let calls = Calls::default();
    let outbox = outbox(&db, &calls, |builder| builder).await;
    let wait = Duration::from_millis(300);
    let delayed = Event::text("t", "{}").deliver_after(wait).build().unwrap();
    let started = tokio::time::Instant::now();
    write(&outbox, std::slice::from_ref(&delayed)).await;
    calls.wait_for(1).await;
    assert!(started.elapsed() >= wait);
    let delivered = &calls.events()[0];
    assert!(delivered.is_delayed());
    let row = row_when(&outbox, delayed.id(), |row| row.status == OutboxStatus::Done).await;
    // A database stores the due time, not the delay.
    if let Delay::Until(until) = delivered.delay() {
        assert_eq!(until, row.available_at);
    }
    assert!(row.available_at - row.created_at >= chrono::TimeDelta::from_std(wait).unwrap());
    outbox.close().await;
}

async fn k7_no_connection_stays_in_use<H: Harness>(db: H) {
    let calls = Calls::default();
    let pool = db.pool().await;
    let outbox = Outbox::new(pool.clone()).listeners(calls.listeners()).start().await.unwrap();
    for _ in 0..20 {
        write(&outbox, &[event()]).await;
    }
    let writers = (0..4).map(|_| {
        let outbox = outbox.clone();
        tokio::spawn(async move {
            for _ in 0..10 {
                write(&outbox, &[event()]).await;
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    outbox.begin().await.unwrap().rollback().await.unwrap();
    calls.wait_for(60).await;
    outbox.close().await;
    all_back::<H>(&pool).await;
    assert_eq!(calls.ids().len(), 60);
}
