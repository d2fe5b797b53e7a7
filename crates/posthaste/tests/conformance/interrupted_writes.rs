//! Writes, commits and queries that are interrupted, and transactions that the database rolls back by itself.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use posthaste::{DeadFilter, Event, Mode, Outbox};
use posthaste_core::outbox::Store;
use posthaste_testing::{HookCall, RecordingHook};
use tokio::time::timeout;

use crate::harness::{
    Calls, Harness, MySql, PATIENCE, Postgres, SqlAccess, all_back, all_done, event, named, on_every_store, outbox,
    row, until,
};

on_every_store! {
    after_an_ignored_write_error_only_committed_events_are_delivered,
    a_failed_duplicate_write_does_not_release_the_first_event,
    a_dropped_commit_future_still_commits,
    a_dropped_write_future_loses_no_lease,
    a_dropped_operator_query_leaves_a_usable_connection,
}

mod on_postgres {
    crate::harness::declare!(Postgres, a_commit_that_the_database_rolled_back_is_an_error);
}

mod on_mysql {
    crate::harness::declare!(MySql, a_deadlock_that_is_ignored_fails_the_commit);
}

const HOT_MODES: [Mode; 2] = [Mode::SingleNode, Mode::MultiNode];

/// After a failed statement some databases roll back the transaction and others do not. commit() reports what happened.
async fn after_an_ignored_write_error_only_committed_events_are_delivered<H: Harness>(db: H) {
    for mode in [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED] {
        let (calls, hook) = (Calls::default(), RecordingHook::new());
        let table = format!("ignored_{}", mode.word());
        let builder = Outbox::new(db.pool().await).mode(mode).table(&table).hook(hook.clone());
        let outbox = builder.listeners(calls.listeners()).start().await.unwrap();
        let (existing, first) = (named("existing"), event());
        let mut transaction = outbox.begin().await.unwrap();
        outbox.write(&mut transaction, &existing).await.unwrap();
        transaction.commit().await.unwrap();
        let mut transaction = outbox.begin().await.unwrap();
        outbox.write(&mut transaction, &first).await.unwrap();
        assert!(outbox.write(&mut transaction, &existing).await.is_err(), "its id is already in use");
        let committed = transaction.commit().await.is_ok();
        assert_eq!(outbox.find(first.id()).await.unwrap().is_some(), committed, "{mode:?}");
        let reported = hook.calls().into_iter().rev().find_map(|call| match call {
            HookCall::AfterCommit(_) => Some(true),
            HookCall::AfterRollback(_) => Some(false),
            _ => None,
        });
        assert_eq!(reported, Some(committed), "{mode:?}: the hook is called with the real outcome");
        let last = event();
        let mut transaction = outbox.begin().await.unwrap();
        outbox.write(&mut transaction, &last).await.unwrap();
        transaction.commit().await.unwrap();
        calls.wait_for(if committed { 3 } else { 2 }).await;
        outbox.close().await;
        assert_eq!(calls.ids().contains(&first.id().to_owned()), committed, "{mode:?}");
    }
}

/// The second write fails because the first one used the id. The event of the first write is delivered once.
async fn a_failed_duplicate_write_does_not_release_the_first_event<H: Harness>(db: H) {
    let calls = Calls::default();
    let slow = calls.slow_listeners(Duration::from_millis(500));
    let builder = Outbox::new(db.pool().await).mode(Mode::MultiNode).poll_interval(Duration::from_millis(20));
    let outbox = builder.listeners(slow).start().await.unwrap();
    let (twice, last) = (event(), event());
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write(&mut transaction, &twice).await.unwrap();
    assert!(outbox.write(&mut transaction, &twice).await.is_err(), "its id is already in use");
    let committed = transaction.commit().await.is_ok();
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write(&mut transaction, &last).await.unwrap();
    transaction.commit().await.unwrap();
    let mut ids = vec![last.id().to_owned()];
    ids.extend(committed.then(|| twice.id().to_owned()));
    all_done(&outbox, &ids).await;
    outbox.close().await;
    assert_eq!(calls.counts(), ids.into_iter().map(|id| (id, 1)).collect());
}

async fn a_commit_that_the_database_rolled_back_is_an_error(db: Postgres) {
    let delayed = || Event::text("t", "{}").deliver_after(Duration::from_secs(3_600)).build().unwrap();
    for (mode, event) in [
        (Mode::SingleNode, Some(delayed())),
        (Mode::SingleNode, Some(event())),
        (Mode::MultiNode, Some(delayed())),
        (Mode::ORDERED, Some(event())),
        (Mode::ORDERED, None),
    ] {
        let (calls, hook) = (Calls::default(), RecordingHook::new());
        let builder = Outbox::new(db.pool().await).mode(mode).table(format!("rolled_back_{}", mode.word()));
        let outbox = builder.hook(hook.clone()).listeners(calls.listeners()).start().await.unwrap();
        let mut transaction = outbox.begin().await.unwrap();
        if let Some(event) = &event {
            outbox.write(&mut transaction, event).await.unwrap();
        }
        assert!(sqlx::query("SELECT 1/0").execute(&mut *transaction).await.is_err());
        let error = transaction.commit().await.expect_err("PostgreSQL rolled it back");
        assert!(error.chain().contains("commit a transaction"), "{}", error.chain());
        if let Some(event) = &event {
            assert!(outbox.find(event.id()).await.unwrap().is_none());
            assert!(matches!(hook.calls().last(), Some(HookCall::AfterRollback(_))), "{:?}", hook.calls());
        }
        outbox.close().await;
        assert_eq!(calls.len(), 0);
    }
    // The same, caused by a failed write of another outbox in the transaction.
    let (calls, others) = (Calls::default(), Calls::default());
    let outbox = outbox(&db, &calls, |builder| builder.table("one")).await;
    let other = crate::harness::outbox(&db, &others, |builder| builder.table("other")).await;
    let (existing, mine) = (named("existing"), event());
    crate::harness::write(&other, std::slice::from_ref(&existing)).await;
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write(&mut transaction, &mine).await.unwrap();
    assert!(other.write(&mut transaction, &existing).await.is_err(), "its id is already in use");
    transaction.commit().await.expect_err("PostgreSQL rolled it back");
    outbox.close().await;
    other.close().await;
    assert_eq!(calls.len(), 0);
}

async fn a_deadlock_that_is_ignored_fails_the_commit(db: MySql) {
    for mode in [Mode::MultiNode, Mode::ORDERED] {
        let calls = Calls::default();
        let builder = Outbox::new(db.pool().await).mode(mode).table(format!("deadlock_{}", mode.word()));
        let outbox = builder.listeners(calls.listeners()).start().await.unwrap();
        db.execute("CREATE TABLE IF NOT EXISTS accounts (id integer PRIMARY KEY, balance integer)").await;
        db.execute("DELETE FROM accounts").await;
        db.execute("INSERT INTO accounts SELECT seq, 0 FROM seq_1_to_100").await;
        let event = event();
        let mut victim = outbox.begin().await.unwrap();
        outbox.write(&mut victim, &event).await.unwrap();
        MySql::execute_on(&mut victim, "UPDATE accounts SET balance = 1 WHERE id = 1").await;
        // The other transaction has changed more rows, so the server rolls back the one with the event.
        let pool = db.pool().await;
        let mut other = pool.begin().await.unwrap();
        sqlx::query("UPDATE accounts SET balance = 2 WHERE id > 1").execute(&mut *other).await.unwrap();
        let waiting = tokio::spawn(async move {
            sqlx::query("UPDATE accounts SET balance = 2 WHERE id = 1").execute(&mut *other).await.unwrap();
            other.rollback().await.unwrap();
        });
        let deadlock = sqlx::query("UPDATE accounts SET balance = 1 WHERE id = 2").execute(&mut *victim).await;
        assert!(deadlock.is_err(), "a deadlock");
        waiting.await.unwrap();
        assert!(victim.commit().await.is_err(), "{mode:?}: the server rolled it back");
        assert!(outbox.find(event.id()).await.unwrap().is_none());
        outbox.close().await;
        assert_eq!(calls.len(), 0);
    }
}

/// Every event whose row exists is delivered without waiting for the end of its lease, which lasts half a minute.
async fn all_are_delivered_once<S: Store>(outbox: &Outbox<S>, calls: &Calls, events: &[Event]) {
    let mut there = Vec::new();
    for event in events {
        if outbox.find(event.id()).await.unwrap().is_some() {
            there.push(event.id().to_owned());
        }
    }
    timeout(PATIENCE / 3, all_done(outbox, &there)).await.expect("without waiting for a lease");
    for id in &there {
        assert_eq!(row(outbox, id).await.lease_losses, 0, "no lease was lost");
    }
    let counts = calls.counts();
    assert!(there.iter().all(|id| counts.get(id) == Some(&1)), "once each");
    assert_eq!(counts.len(), there.len(), "no other event is delivered");
}

async fn a_dropped_commit_future_still_commits<H: Harness>(db: H) {
    for mode in HOT_MODES {
        let calls = Calls::default();
        let table = format!("dropped_commit_{}", mode.word());
        let outbox = outbox(&db, &calls, |builder| builder.mode(mode).table(&table)).await;
        let mut events = Vec::new();
        for patience in 0..40 {
            let event = event();
            let mut transaction = outbox.begin().await.unwrap();
            outbox.write(&mut transaction, &event).await.unwrap();
            if let Ok(committed) = timeout(Duration::from_micros(patience * 25), transaction.commit()).await {
                committed.unwrap();
            }
            events.push(event);
        }
        // A commit that began is completed: no transaction stays open, and every event is in the table.
        until("every commit is completed", async || {
            let mut there = 0;
            for event in &events {
                there += usize::from(outbox.find(event.id()).await.unwrap().is_some());
            }
            there == events.len()
        })
        .await;
        all_are_delivered_once(&outbox, &calls, &events).await;
        outbox.close().await;
    }
}

async fn a_dropped_write_future_loses_no_lease<H: Harness>(db: H) {
    for mode in HOT_MODES {
        let calls = Calls::default();
        let table = format!("dropped_write_{}", mode.word());
        let outbox = outbox(&db, &calls, |builder| builder.mode(mode).table(&table)).await;
        let mut events = Vec::new();
        for patience in 0..40 {
            let (event, last) = (event(), event());
            let mut transaction = outbox.begin().await.unwrap();
            let _ = timeout(Duration::from_micros(patience * 25), outbox.write(&mut transaction, &event)).await;
            // The service continues without knowing if the event was written.
            outbox.write(&mut transaction, &last).await.unwrap();
            transaction.commit().await.unwrap();
            assert!(outbox.find(last.id()).await.unwrap().is_some());
            events.extend([event, last]);
        }
        all_are_delivered_once(&outbox, &calls, &events).await;
        assert!(calls.len() > 0);
        outbox.close().await;
    }
}

/// Drops a future after this many polls, or when it is ready.
async fn drop_after(polls: usize, future: impl Future) {
    let (mut future, mut left) = (pin!(future), polls);
    poll_fn(|context| {
        left -= 1;
        match future.as_mut().poll(context) {
            Poll::Pending if left > 0 => Poll::Pending,
            _ => Poll::Ready(()),
        }
    })
    .await;
}

/// A pool of the service must not keep a connection that still gets the answer to a dropped statement.
async fn a_dropped_operator_query_leaves_a_usable_connection<H: Harness>(db: H) {
    for polls in 1..10 {
        // A new pool, because the first execution of a statement takes the most messages.
        let pool = db.pool().await;
        let outbox = Outbox::new(pool.clone()).mode(Mode::WriterOnly).start().await.unwrap();
        drop_after(polls, outbox.find("unknown")).await;
        drop_after(polls, outbox.dead().count(&DeadFilter::all())).await;
        drop_after(polls, outbox.purge()).await;
        all_back::<H>(&pool).await;
        let event = event();
        let mut transaction = outbox.begin().await.unwrap();
        outbox.write(&mut transaction, &event).await.unwrap();
        transaction.commit().await.unwrap();
        let found = timeout(PATIENCE, outbox.find(event.id())).await.expect("the next query is answered");
        assert_eq!(found.unwrap().expect("the event was written").event_id, event.id());
        outbox.close().await;
    }
}
