//! What a user's test can do with an outbox in memory, and the laws of a store and its upkeep on it.

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthaste_core::outbox::roles::*;
use posthaste_core::outbox::{
    ClaimRequest, ClaimedRows, DeadFilter, DeadHead, LeaseSet, Mode, OperatorStore, Outbox, OutboxStatus, Owner, Pool,
    Purge, RowUpdate, TableName, WriteError,
};
use posthaste_core::{Event, EventBuilder, Failure, FaultKind, Wakeup};
use posthaste_testing::{HookCall, MemoryDatabase, MemoryOutbox, RecordingHook};
use tokio::time::sleep;

const LEASE: Duration = Duration::from_secs(30);
const TABLE: &str = "outbox_event";

fn event(id: &str) -> EventBuilder {
    Event::text("order.placed", "{}").id(id.to_owned())
}

fn of_key(id: &str, key: &str) -> EventBuilder {
    event(id).aggregate("order", key)
}

async fn open(database: &MemoryDatabase, mode: Mode) -> MemoryOutbox {
    database.open(TableName::default(), mode).await.unwrap()
}

async fn write(store: &MemoryOutbox, events: impl IntoIterator<Item = EventBuilder>) {
    let mut transaction = store.begin().await.unwrap();
    for event in events {
        store.insert(&mut transaction, &[&event.build().unwrap()], None).await.unwrap();
    }
    transaction.commit().await.unwrap();
}

async fn take(store: &MemoryOutbox, claim_id: &str, suspects: bool) -> ClaimedRows {
    let request = ClaimRequest {
        event_type: None,
        in_flight: &[],
        limit: 10,
        after: None,
        claim_id,
        lease: LEASE,
        allow_suspects: suspects,
        skip_recent: Duration::ZERO,
    };
    store.claim(&request).await.unwrap()
}

async fn taken(store: &MemoryOutbox, claim_id: &str) -> Vec<i64> {
    take(store, claim_id, true).await.rows.iter().map(|row| row.position.seq).collect()
}

fn done(seq: i64) -> RowUpdate {
    RowUpdate { seq, status: OutboxStatus::Done, attempts: None, wait: None, error: None }
}

fn dead(seq: i64) -> RowUpdate {
    RowUpdate::dead(seq, &Failure::permanent("410", "gone"))
}

fn statuses(database: &MemoryDatabase) -> Vec<OutboxStatus> {
    database.rows(TABLE).iter().map(|row| row.status).collect()
}

/// An outbox whose listener writes down what it was given.
async fn delivering(database: &MemoryDatabase, mode: Mode) -> (Outbox<MemoryOutbox>, Arc<Mutex<Vec<String>>>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let seen_by_listener = seen.clone();
    let outbox = Outbox::new(database.clone()).mode(mode).on("order.placed", move |event| {
        seen_by_listener.lock().unwrap().push(event.id().to_owned());
        async {}
    });
    (outbox.start().await.unwrap(), seen)
}

#[tokio::test(start_paused = true)]
async fn what_commits_is_delivered_and_what_is_rolled_back_or_dropped_never_was() {
    for mode in [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED] {
        let database = MemoryDatabase::new();
        let (outbox, seen) = delivering(&database, mode).await;
        let mut transaction = outbox.begin().await.unwrap();
        outbox.write(&mut transaction, event("committed")).await.unwrap();
        assert!(database.rows(TABLE).is_empty(), "nothing is seen before the commit");
        transaction.commit().await.unwrap();
        let mut plain = database.begin().await.unwrap();
        outbox.write(&mut plain, event("plain")).await.unwrap();
        plain.commit().await.unwrap();
        let mut rolled_back = outbox.begin().await.unwrap();
        outbox.write(&mut rolled_back, event("rolled-back")).await.unwrap();
        rolled_back.rollback().await.unwrap();
        let mut dropped = database.begin().await.unwrap();
        outbox.write(&mut dropped, event("dropped")).await.unwrap();
        drop(dropped);
        sleep(Duration::from_millis(200)).await;
        assert_eq!(*seen.lock().unwrap(), ["committed", "plain"], "{mode:?}");
        assert_eq!(statuses(&database), [OutboxStatus::Done; 2], "{mode:?}");
        assert_eq!((database.commits(), database.rollbacks()), (2, 2));
        outbox.close().await;
    }
}

#[tokio::test(start_paused = true)]
async fn commits_fail_or_lose_their_answer_as_they_are_told() {
    let database = MemoryDatabase::new();
    let (outbox, seen) = delivering(&database, Mode::MultiNode).await;
    let commit = async |id: &str| {
        let mut transaction = outbox.begin().await.unwrap();
        outbox.write(&mut transaction, event(id)).await.unwrap();
        transaction.commit().await.map_err(|error| error.kind())
    };
    database.fail_commits(1);
    assert_eq!(commit("failed").await, Err(FaultKind::Transient));
    database.lose_commits(1);
    assert_eq!(commit("lost").await, Err(FaultKind::OutcomeUnknown));
    assert_eq!(commit("fine").await, Ok(()));
    database.refuse(1);
    assert_eq!(outbox.begin().await.err().map(|error| error.kind()), Some(FaultKind::Transient));
    sleep(Duration::from_secs(10)).await;
    let seen: HashSet<String> = seen.lock().unwrap().iter().cloned().collect();
    assert_eq!(seen, HashSet::from(["lost".to_owned(), "fine".to_owned()]));
    outbox.close().await;
}

#[tokio::test]
async fn an_event_id_is_there_once() {
    let database = MemoryDatabase::new();
    let outbox = Outbox::new(database.clone()).mode(Mode::WriterOnly).start().await.unwrap();
    let (mut one, mut other) = (outbox.begin().await.unwrap(), outbox.begin().await.unwrap());
    outbox.write(&mut one, event("same")).await.unwrap();
    outbox.write(&mut other, event("same")).await.unwrap();
    one.commit().await.unwrap();
    assert_eq!(other.commit().await.unwrap_err().kind(), FaultKind::Permanent);
    let mut third = outbox.begin().await.unwrap();
    let Err(WriteError::Store(error)) = outbox.write(&mut third, event("same")).await else { panic!("an error") };
    assert_eq!(error.kind(), FaultKind::Permanent);
    assert_eq!(statuses(&database), [OutboxStatus::New], "nobody here delivers");
}

#[tokio::test]
async fn numbers_are_given_at_the_insert_and_tables_know_nothing_of_each_other() {
    let database = MemoryDatabase::new();
    let store = open(&database, Mode::MultiNode).await;
    let other = database.open(TableName::new("other").unwrap(), Mode::MultiNode).await.unwrap();
    let (mut late, mut early) = (store.begin().await.unwrap(), store.begin().await.unwrap());
    assert_eq!(store.insert(&mut late, &[&event("a").build().unwrap()], None).await.unwrap(), [1]);
    let both = [&event("b").build().unwrap(), &event("c").build().unwrap()];
    assert_eq!(store.insert(&mut early, &both, None).await.unwrap(), [2, 3]);
    assert_eq!(other.insert(&mut early, &both, None).await.unwrap(), [1, 2]);
    early.commit().await.unwrap();
    assert_eq!(taken(&store, "x:1").await, [2, 3]);
    late.commit().await.unwrap();
    assert_eq!(taken(&store, "x:2").await, [1]);
    assert_eq!(database.rows("other").len(), 2);
    assert!(database.rows("nobody's").is_empty());
}

#[tokio::test(start_paused = true)]
async fn rows_that_lost_a_lease_are_taken_in_a_group_then_alone_and_are_dead_after_four() {
    let database = MemoryDatabase::new();
    let store = open(&database, Mode::MultiNode).await;
    write(&store, [event("bad"), event("good")]).await;
    assert_eq!(taken(&store, "x:1").await, [1, 2]);
    assert_eq!(taken(&store, "x:2").await, [0; 0]);
    for (losses, group) in [(1, vec![1, 2]), (2, vec![1]), (3, vec![1])] {
        sleep(LEASE).await;
        assert!(take(&store, "y:1", false).await.rows.is_empty(), "suspects are not allowed");
        let (claim_id, started) = (format!("x:{losses}0"), format!("x:{losses}0:started"));
        assert_eq!(taken(&store, &claim_id).await, group);
        assert_eq!(
            store.settle(&["x:1".to_owned()], &[done(1)]).await.unwrap().applied,
            HashSet::new(),
            "a stale claim_id"
        );
        assert_eq!(database.rows(TABLE)[0].lease_losses, losses);
        assert_eq!(store.mark_started(&claim_id, &started, &[1]).await.unwrap(), HashSet::from([1]));
    }
    sleep(LEASE).await;
    let last = take(&store, "x:40", true).await;
    assert!(last.rows[0].is_dead && last.rows.len() == 1);
    let row = &database.rows(TABLE)[0];
    assert_eq!((row.status, row.locked_by.clone()), (OutboxStatus::Dead, None));
    assert!(row.last_error.as_ref().unwrap().starts_with("lease_lost"));
    assert_eq!(taken(&store, "x:50").await, [2]);
    assert_eq!(database.rows(TABLE)[1].lease_losses, 1, "its delivery was never started");
    let retry = RowUpdate { status: OutboxStatus::Retry, attempts: Some(1), ..done(2) };
    assert_eq!(store.settle(&["x:50".to_owned()], &[retry]).await.unwrap().applied, HashSet::from([2]));
    assert_eq!(database.rows(TABLE)[1].lease_losses, 0, "an attempt came to its end");
}

#[tokio::test(start_paused = true)]
async fn a_table_has_one_owner_and_its_generation_fences_the_elder() {
    let database = MemoryDatabase::new();
    let store = open(&database, Mode::SingleNode).await;
    write(&store, [event("a")]).await;
    assert_eq!(store.acquire_ownership("one", LEASE).await.unwrap(), Owner::Us { generation: 1 });
    sleep(LEASE / 3).await;
    assert_eq!(store.acquire_ownership("other", LEASE).await.unwrap(), Owner::Other { remaining: LEASE * 2 / 3 });
    sleep(LEASE).await;
    assert_eq!(
        store.acquire_ownership("one", LEASE).await.unwrap(),
        Owner::Us { generation: 1 },
        "nobody was in between"
    );
    store.release_ownership("one").await.unwrap();
    assert_eq!(store.acquire_ownership("other", LEASE).await.unwrap(), Owner::Us { generation: 2 });
    assert_eq!(store.settle(&["one:1".to_owned()], &[done(1)]).await.unwrap().applied, HashSet::new());
    assert_eq!(store.settle(&["other:2".to_owned()], &[done(1)]).await.unwrap().applied, HashSet::from([1]));
}

#[tokio::test(start_paused = true)]
async fn a_dead_head_blocks_its_key_or_is_skipped() {
    for (dead_head, after) in [(DeadHead::Block, vec![]), (DeadHead::Skip, vec![2, 3])] {
        let database = MemoryDatabase::new();
        let store = open(&database, Mode::Ordered(dead_head)).await;
        write(&store, [of_key("a1", "a"), of_key("a2", "a"), of_key("a3", "a"), of_key("b1", "b")]).await;
        assert_eq!(taken(&store, "x:1").await, [1, 2, 3, 4]);
        let claim_id = ["x:1".to_owned()];
        assert_eq!(store.settle(&claim_id, &[dead(1), done(4)]).await.unwrap().applied, HashSet::from([1, 4]));
        store.release(&LeaseSet::Rows { claim_ids: &claim_id, rows: &[2, 3] }).await.unwrap();
        assert_eq!(taken(&store, "x:2").await, after);
        assert!(store.discard("a1").await.unwrap());
        store.release(&LeaseSet::Rows { claim_ids: &["x:2".to_owned()], rows: &[2, 3] }).await.unwrap();
        assert_eq!(taken(&store, "x:3").await, [2, 3], "nothing is before them any more");
    }
}

#[tokio::test(start_paused = true)]
async fn operators_see_replay_discard_and_purge_what_they_may() {
    let database = MemoryDatabase::new();
    let store = open(&database, Mode::MultiNode).await;
    write(&store, ["a", "b", "c", "d"].map(event)).await;
    assert_eq!(taken(&store, "x:1").await, [1, 2, 3, 4]);
    store.settle(&["x:1".to_owned()], &[dead(1), dead(2), done(3)]).await.unwrap();
    let all = DeadFilter::all();
    assert_eq!(store.count_dead(&all).await.unwrap(), 2);
    assert_eq!(store.count_dead(&DeadFilter::all().event_type("other")).await.unwrap(), 0);
    assert_eq!(store.dead(&all, 1).await.unwrap()[0].event_id, "a");
    assert!(!store.discard("c").await.unwrap() && store.discard("a").await.unwrap());
    assert_eq!(store.replay(&all, 0, 10).await.unwrap(), (1, 2));
    let row = store.find("b").await.unwrap().unwrap();
    assert_eq!((row.status, row.attempts, row.done_at, row.last_error), (OutboxStatus::New, 0, None, None));
    sleep(Duration::from_secs(60)).await;
    assert_eq!(store.oldest_due().await.unwrap(), Some(Duration::from_secs(60)));
    assert_eq!(store.purge(Purge::Done, Duration::from_secs(61), 10).await.unwrap(), 0);
    assert_eq!(store.purge(Purge::Done, Duration::from_secs(60), 10).await.unwrap(), 1);
    assert_eq!(store.purge(Purge::Dead, Duration::ZERO, 10).await.unwrap(), 0);
    assert_eq!(store.purge(Purge::Everything, Duration::ZERO, 1).await.unwrap(), 1);
    assert_eq!(database.rows(TABLE).len(), 1, "the oldest first");
}

#[tokio::test(start_paused = true)]
async fn other_processes_are_told() {
    let database = MemoryDatabase::new();
    let (one, other) = (open(&database, Mode::MultiNode).await, open(&database, Mode::MultiNode).await);
    let wakeup = Wakeup::default();
    tokio::select! {
        biased;
        _ = one.listen(wakeup.clone()) => panic!("it listens for ever"),
        () = sleep(Duration::from_secs(1)) => {}
        () = async {
            other.notify().await.unwrap();
            wakeup.signalled().await;
        } => {}
    }
    let (writer, _) = delivering(&database, Mode::MultiNode).await;
    writer.close().await;
    let (reader, seen) = delivering(&database, Mode::MultiNode).await;
    sleep(Duration::from_secs(1)).await;
    let operator = Outbox::new(database.clone()).mode(Mode::WriterOnly).start().await.unwrap();
    let mut transaction = operator.begin().await.unwrap();
    operator.write(&mut transaction, event("told")).await.unwrap();
    transaction.commit().await.unwrap();
    // Long before the next poll.
    sleep(Duration::from_millis(20)).await;
    assert_eq!(*seen.lock().unwrap(), ["told"]);
    reader.close().await;
}

#[tokio::test(start_paused = true)]
async fn dead_events_are_replayed_through_the_outbox() {
    let database = MemoryDatabase::new();
    let outbox = Outbox::new(database.clone()).on("other", |_| async {}).start().await.unwrap();
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write_all(&mut transaction, ["a", "b"].map(event)).await.unwrap();
    transaction.commit().await.unwrap();
    sleep(Duration::from_secs(1)).await;
    assert_eq!(statuses(&database), [OutboxStatus::Dead; 2], "nobody listens for it");
    outbox.close().await;
    let (outbox, seen) = delivering(&database, Mode::SingleNode).await;
    assert_eq!(outbox.dead().replay_all(&DeadFilter::all(), NonZeroUsize::MIN).await.unwrap(), 2);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(*seen.lock().unwrap(), ["a", "b"]);
    outbox.close().await;
}

#[tokio::test(start_paused = true)]
async fn a_recording_hook_knows_what_was_called_in_which_order() {
    let hook = RecordingHook::new();
    let outbox = Outbox::new(MemoryDatabase::new()).mode(Mode::WriterOnly).hook(hook.clone()).start().await.unwrap();
    let (one, two) = (event("one").build().unwrap(), event("two").build().unwrap());
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write(&mut transaction, &one).await.unwrap();
    transaction.commit().await.unwrap();
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write(&mut transaction, &two).await.unwrap();
    drop(transaction);
    let calls = [
        HookCall::BeforeWrite(vec![one.clone()]),
        HookCall::AfterWrite(vec![one.clone()]),
        HookCall::AfterCommit(vec![one]),
        HookCall::BeforeWrite(vec![two.clone()]),
        HookCall::AfterWrite(vec![two.clone()]),
        HookCall::AfterRollback(vec![two]),
    ];
    assert_eq!(hook.calls(), calls);
}
