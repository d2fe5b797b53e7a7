//! C: the transaction in which events are written.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthaste::{Event, FaultKind, Mode, Outbox, OutboxStatus, WriterHook};
use posthaste_backend_tests::servers::{Cutter, Keep};
use posthaste_core::outbox::Store;
use posthaste_testing::{HookCall, RecordingHook};
use sqlx::postgres::PgPoolOptions;

use crate::harness::{
    Calls, Database, Harness, Memory, Postgres, SqlAccess, all_back, all_done, event, events, on_every_database,
    on_every_store, outbox, row_when, watched, writer,
};

on_every_store! {
    c2_a_transaction_can_move_to_another_task,
    c3_commit_and_rollback_call_only_their_own_callbacks,
    c4_a_panicking_callback_does_not_stop_the_others,
    c5_only_a_commit_persists_events,
    c6_every_end_of_a_transaction_returns_its_connection,
    c7_a_failing_commit_is_a_rollback,
    c8_a_failed_begin_leaks_no_connection,
    c9_events_of_a_plain_transaction_are_delivered_after_its_commit,
}

on_every_database! {
    c1_the_service_and_its_events_share_one_transaction,
}

async fn c1_the_service_and_its_events_share_one_transaction<H: Database>(db: H) {
    let outbox = writer(&db).await;
    db.execute("CREATE TABLE orders (id integer PRIMARY KEY)").await;
    let orders = "SELECT concat(count(*), '') FROM orders";
    for commits in [false, true] {
        let event = event();
        let mut transaction = outbox.begin().await.unwrap();
        H::execute_on(&mut transaction, "INSERT INTO orders (id) VALUES (7)").await;
        outbox.write(&mut transaction, &event).await.unwrap();
        match commits {
            true => transaction.commit().await.unwrap(),
            false => transaction.rollback().await.unwrap(),
        }
        assert_eq!(outbox.find(event.id()).await.unwrap().is_some(), commits);
        assert_eq!(db.text(orders).await.as_deref(), Some(if commits { "1" } else { "0" }));
    }
}

async fn c2_a_transaction_can_move_to_another_task<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let mut transaction = outbox.begin().await.unwrap();
    let (first, second) = (event(), event());
    outbox.write(&mut transaction, &first).await.unwrap();
    // Code outside of the transaction does not see its rows. Then another task continues the transaction.
    assert!(outbox.find(first.id()).await.unwrap().is_none());
    let (elsewhere, written) = (outbox.clone(), second.clone());
    let moved = tokio::spawn(async move {
        elsewhere.write(&mut transaction, &written).await.unwrap();
        transaction
    });
    moved.await.unwrap().commit().await.unwrap();
    for event in [first, second] {
        assert!(outbox.find(event.id()).await.unwrap().is_some());
    }
}

async fn c3_commit_and_rollback_call_only_their_own_callbacks<H: Harness>(db: H) {
    let hook = RecordingHook::new();
    let outbox = Outbox::new(db.pool().await).mode(Mode::WriterOnly).hook(hook.clone()).start().await.unwrap();
    let ends = || {
        let calls = hook.calls().into_iter();
        let ends = calls.filter(|call| matches!(call, HookCall::AfterCommit(_) | HookCall::AfterRollback(_)));
        ends.collect::<Vec<_>>()
    };
    let [committed, rolled_back, dropped] = [events(1), events(1), events(1)];
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write_all(&mut transaction, &committed).await.unwrap();
    transaction.commit().await.unwrap();
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write_all(&mut transaction, &rolled_back).await.unwrap();
    transaction.rollback().await.unwrap();
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write_all(&mut transaction, &dropped).await.unwrap();
    drop(transaction);
    let expected =
        [HookCall::AfterCommit(committed), HookCall::AfterRollback(rolled_back), HookCall::AfterRollback(dropped)];
    assert_eq!(ends(), expected);
    outbox.begin().await.unwrap().commit().await.unwrap();
    assert_eq!(ends(), expected, "nothing was written in the last transaction");
}

/// A hook that panics in its first call.
struct PanicsOnce(Arc<Mutex<Vec<String>>>);

impl WriterHook for PanicsOnce {
    fn after_commit(&self, events: &[Event]) {
        let mut seen = posthaste_core::lock(&self.0);
        seen.push(events[0].id().to_owned());
        assert!(seen.len() > 1, "the first call panics");
    }
}

async fn c4_a_panicking_callback_does_not_stop_the_others<H: Harness>(db: H) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let hook = PanicsOnce(seen.clone());
    let outbox = Outbox::new(db.pool().await).mode(Mode::WriterOnly).hook(hook).start().await.unwrap();
    let mut transaction = outbox.begin().await.unwrap();
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.extend(outbox.write(&mut transaction, event()).await.unwrap());
    }
    transaction.commit().await.unwrap();
    assert_eq!(*posthaste_core::lock(&seen), ids);
}

async fn c5_only_a_commit_persists_events<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let [committed, rolled_back, dropped] = [event(), event(), event()];
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write(&mut transaction, &committed).await.unwrap();
    assert!(outbox.find(committed.id()).await.unwrap().is_none(), "a write does not commit");
    transaction.commit().await.unwrap();
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write(&mut transaction, &rolled_back).await.unwrap();
    transaction.rollback().await.unwrap();
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write(&mut transaction, &dropped).await.unwrap();
    drop(transaction);
    assert!(outbox.find(committed.id()).await.unwrap().is_some());
    for gone in [rolled_back, dropped] {
        assert!(outbox.find(gone.id()).await.unwrap().is_none());
    }
}

async fn c6_every_end_of_a_transaction_returns_its_connection<H: Harness>(db: H) {
    // A doc test shows that a second commit or rollback does not compile.
    let pool = db.pool().await;
    let outbox = Outbox::new(pool.clone()).mode(Mode::WriterOnly).start().await.unwrap();
    for end in 0..9 {
        let mut transaction = outbox.begin().await.unwrap();
        outbox.write(&mut transaction, event()).await.unwrap();
        match end % 3 {
            0 => transaction.commit().await.unwrap(),
            1 => transaction.rollback().await.unwrap(),
            _ => drop(transaction),
        }
    }
    all_back::<H>(&pool).await;
}

async fn c7_a_failing_commit_is_a_rollback<H: Harness>(db: H) {
    let (pool, call_log) = watched(&db).await;
    let (connections, hook, calls) = (pool.pool.clone(), RecordingHook::new(), Calls::default());
    let builder = Outbox::new(pool).hook(hook.clone()).listeners(calls.listeners());
    let outbox = builder.start().await.unwrap();
    let lost = events(1);
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write_all(&mut transaction, &lost).await.unwrap();
    call_log.refuse("commit", 1);
    let error = transaction.commit().await.unwrap_err();
    assert_eq!(error.chain(), "failed to commit: the test said so", "the original error");
    assert_eq!(hook.calls()[2..], [HookCall::AfterRollback(lost.clone())]);
    let mut transaction = outbox.begin().await.unwrap();
    let id = outbox.write(&mut transaction, event()).await.unwrap().unwrap();
    transaction.commit().await.unwrap();
    all_done(&outbox, std::slice::from_ref(&id)).await;
    outbox.close().await;
    assert_eq!(calls.ids(), [id]);
    assert!(outbox.find(lost[0].id()).await.unwrap().is_none());
    all_back::<H>(&connections).await;
}

/// A deferred constraint makes PostgreSQL refuse the commit.
#[tokio::test(flavor = "multi_thread")]
async fn c7_a_commit_that_postgresql_refuses_is_a_rollback() {
    let db = Postgres::start().await;
    let hook = RecordingHook::new();
    let outbox = Outbox::new(db.pool().await).mode(Mode::WriterOnly).hook(hook.clone()).start().await.unwrap();
    db.execute("CREATE TABLE orders (id integer UNIQUE DEFERRABLE INITIALLY DEFERRED)").await;
    let event = event();
    let mut transaction = outbox.begin().await.unwrap();
    Postgres::execute_on(&mut transaction, "INSERT INTO orders VALUES (7), (7)").await;
    outbox.write(&mut transaction, &event).await.unwrap();
    let error = transaction.commit().await.unwrap_err();
    assert_ne!(error.kind(), FaultKind::OutcomeUnknown);
    assert!(error.chain().contains("orders_id_key"), "{}", error.chain());
    assert_eq!(hook.calls()[2..], [HookCall::AfterRollback(vec![event.clone()])]);
    assert!(outbox.find(event.id()).await.unwrap().is_none());
}

async fn c8_a_failed_begin_leaks_no_connection<H: Harness>(db: H) {
    let (pool, call_log) = watched(&db).await;
    let connections = pool.pool.clone();
    let outbox = Outbox::new(pool).mode(Mode::WriterOnly).start().await.unwrap();
    call_log.refuse("begin", 10);
    for _ in 0..10 {
        assert_eq!(outbox.begin().await.err().unwrap().kind(), FaultKind::Transient);
    }
    all_back::<H>(&connections).await;
    outbox.begin().await.unwrap().commit().await.unwrap();
}

async fn c9_events_of_a_plain_transaction_are_delivered_after_its_commit<H: Harness>(db: H) {
    let calls = Calls::default();
    let outbox = outbox(&db, &calls, |builder| builder.mode(Mode::MultiNode)).await;
    let pool = db.pool().await;
    let gone = event();
    let mut transaction = H::begin_plain(&pool).await;
    outbox.write(&mut transaction, &gone).await.unwrap();
    drop(transaction);
    let mut transaction = H::begin_plain(&pool).await;
    let id = outbox.write(&mut transaction, event()).await.unwrap().unwrap();
    H::commit_plain(transaction).await;
    outbox.committed();
    row_when(&outbox, &id, |row| row.status == OutboxStatus::Done).await;
    outbox.close().await;
    assert_eq!(calls.ids(), [id]);
    assert!(outbox.find(gone.id()).await.unwrap().is_none());
}

/// The answer of a successful commit is lost. The hook is called for a rollback, and the event is still delivered.
async fn lose_an_answer<S: Store>(outbox: Outbox<S>, hook: &RecordingHook, calls: &Calls, lose: impl Fn()) {
    let mut delivered = Vec::new();
    loop {
        let written = event();
        delivered.push(written.id().to_owned());
        let mut transaction = outbox.begin().await.unwrap();
        outbox.write(&mut transaction, &written).await.unwrap();
        lose();
        let Err(error) = transaction.commit().await else {
            // The lost answer was that of a commit of the dispatcher.
            assert!(delivered.len() < 10);
            continue;
        };
        assert_eq!(error.kind(), FaultKind::OutcomeUnknown, "{}", error.chain());
        assert_eq!(hook.calls().last(), Some(&HookCall::AfterRollback(vec![written])));
        break;
    }
    all_done(&outbox, &delivered).await;
    outbox.close().await;
    assert_eq!(calls.counts(), delivered.into_iter().map(|id| (id, 1)).collect());
}

#[tokio::test(flavor = "multi_thread")]
async fn c9_an_unknown_outcome_in_memory_is_a_rollback_for_the_hook() {
    let Memory(database) = Memory::start().await;
    let (hook, calls) = (RecordingHook::new(), Calls::default());
    let builder = Outbox::new(database.clone()).hook(hook.clone()).listeners(calls.listeners());
    lose_an_answer(builder.start().await.unwrap(), &hook, &calls, || database.lose_commits(1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn c9_an_unknown_outcome_on_postgresql_is_a_rollback_for_the_hook() {
    let db = Postgres::start().await;
    let cutter = Cutter::to(&db.url).await;
    let pool = PgPoolOptions::new().max_connections(5).connect(cutter.url()).await.unwrap();
    let (hook, calls) = (RecordingHook::new(), Calls::default());
    let builder = Outbox::new(pool).mode(Mode::MultiNode).hook(hook.clone()).listeners(calls.listeners());
    let outbox = builder.poll_interval(Duration::from_secs(60)).start().await.unwrap();
    lose_an_answer(outbox, &hook, &calls, || cutter.cut_when_sent(b"COMMIT", Keep::Forwarded)).await;
}
