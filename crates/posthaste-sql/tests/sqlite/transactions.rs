//! The service's own transactions, concurrent with the outbox's writer connection.

use std::sync::Arc;
use std::time::Duration;

use posthaste_core::outbox::roles::*;
use posthaste_core::outbox::{Mode, OpenError, OperatorStore, OutboxStatus, Pool, Reader, RowUpdate, Table};
use posthaste_core::{Event, FaultKind, Source};
use posthaste_sql::TableName;
use posthaste_sql::sqlite::OutboxStore;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool, SqlitePoolOptions};

use crate::support::{File, LEASE, event, ids};

async fn open(pool: &SqlitePool) -> OutboxStore {
    pool.open(TableName::default(), Mode::MultiNode).await.unwrap()
}

#[tokio::test]
async fn a_database_in_memory_is_refused_with_a_remedy() {
    let pool = SqlitePool::connect("sqlite::memory:").await.unwrap();
    let refused: Result<OutboxStore, OpenError> = pool.open(TableName::default(), Mode::SingleNode).await;
    let error = refused.err().unwrap();
    assert!(matches!(error, OpenError::Unsuitable { .. }));
    assert!(error.to_string().contains("give it a file"), "{error}");
}

#[tokio::test]
async fn only_a_commit_keeps_the_changes_of_a_transaction() {
    let file = File::new();
    let pool = file.pool().await;
    let store = open(&pool).await;
    let write = |id: &'static str, claim_id: Option<&'static str>| {
        let store = store.clone();
        async move {
            let mut transaction = store.begin().await.unwrap();
            store.insert(&mut transaction, &[&event(id, "t", "{}")], claim_id).await.unwrap();
            transaction
        }
    };
    store.commit(write("committed", None).await).await.unwrap();
    store.rollback(write("rolled-back", None).await).await.unwrap();
    drop(write("dropped", None).await);
    store.commit(write("leased", Some("claim_id")).await).await.unwrap();
    for (id, is_there) in [("committed", true), ("rolled-back", false), ("dropped", false), ("leased", true)] {
        assert_eq!(store.find(id).await.unwrap().is_some(), is_there, "{id}");
    }
    let leased = store.find("leased").await.unwrap().unwrap();
    assert_eq!(leased.locked_by.as_deref(), Some("claim_id"));
    assert_eq!(leased.locked_at, Some(leased.created_at), "pre-claimed: the insert leased it");
    let source = Table::open(store, Reader::Dispatcher, LEASE).await.unwrap().dispatcher_source();
    assert_eq!(ids(&source.claim(10).await.unwrap().items), ["committed"]);
    assert_eq!(file.ask::<String>("PRAGMA journal_mode").await, "wal");
}

#[tokio::test]
async fn a_database_without_the_pool_of_a_service_refuses_transactions() {
    let file = File::new();
    let store = file.open().await.outbox(TableName::default(), Mode::SingleNode).await.unwrap();
    let error = store.begin().await.err().unwrap();
    assert_eq!(error.kind(), FaultKind::Permanent);
    assert!(error.chain().contains("pool of a service"), "{}", error.chain());
}

/// The service's connections do not wait for the lock of the file: one that finds the file locked fails at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_that_wait_for_the_writer_lock_never_find_the_file_locked() {
    let file = File::new();
    let options = SqliteConnectOptions::new().filename(file.path()).create_if_missing(true);
    let pool = SqlitePoolOptions::new().max_connections(3);
    let pool = pool.connect_with(options.busy_timeout(Duration::ZERO)).await.unwrap();
    let store = open(&pool).await;
    sqlx::query("CREATE TABLE orders (id INTEGER PRIMARY KEY)").execute(&pool).await.unwrap();
    let writers = (0..8_i64).map(|writer| {
        let store = store.clone();
        tokio::spawn(async move {
            for number in 0..40 {
                let mut transaction = store.begin().await.unwrap();
                let order = sqlx::query("INSERT INTO orders (id) VALUES (?)").bind(writer * 1_000 + number);
                order.execute(&mut *transaction).await.unwrap();
                let event = Event::text("t", number.to_string()).build().unwrap();
                store.insert(&mut transaction, &[&event], None).await.unwrap();
                match number % 10 {
                    7 => drop(transaction),
                    8 => store.rollback(transaction).await.unwrap(),
                    _ => store.commit(transaction).await.unwrap(),
                }
            }
        })
    });
    let writers: Vec<_> = writers.collect();
    // Meanwhile the outbox's own connection claims and settles.
    let source = Table::open(store.clone(), Reader::Dispatcher, LEASE).await.unwrap().dispatcher_source();
    let mut settled = 0;
    let drain = async {
        while settled < 8 * 32 {
            for claimed in source.claim(5).await.unwrap().items {
                crate::support::settle(&source, &claimed, posthaste_core::Disposition::Done).await;
                settled += 1;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), drain).await.expect("everything is settled");
    for writer in writers {
        writer.await.unwrap();
    }
    assert_eq!(file.ask::<i64>("SELECT count(*) FROM orders").await, 8 * 32);
    assert_eq!(file.ask::<i64>("SELECT count(*) FROM outbox_event WHERE status = 1").await, 8 * 32);
}

/// Two outboxes on one file, and the service's transactions, wait for the same writer lock.
#[tokio::test]
async fn all_writers_of_one_file_wait_for_one_writer_lock() {
    let file = File::new();
    let pool = file.pool().await;
    let store = open(&pool).await;
    let other = file.open().await;
    let transaction = store.begin().await.unwrap();
    let check = tokio::spawn(async move { other.check().await });
    let mut second = Box::pin(store.begin());
    assert!(futures_util::poll!(second.as_mut()).is_pending(), "the first transaction has the writer lock");
    store.commit(transaction).await.unwrap();
    check.await.unwrap().unwrap();
    store.rollback(second.await.unwrap()).await.unwrap();
}

#[tokio::test]
async fn a_transaction_that_stays_open_for_too_long_fails_only_statements_that_wait_for_it() {
    let file = File::new();
    let pool = file.pool().await;
    let store = open(&pool).await;
    store.register(Reader::Dispatcher, LEASE).await.unwrap();
    let mut kept = store.begin().await.unwrap();
    let seq = store.insert(&mut kept, &[&event("1", "t", "{}")], Some("claim_id")).await.unwrap()[0];
    let done = RowUpdate { seq, status: OutboxStatus::Done, attempts: None, wait: None, error: None };
    let fencing_tokens = ["claim_id".to_owned()];
    let error = store.settle(&fencing_tokens, std::slice::from_ref(&done)).await.unwrap_err();
    assert_eq!(error.kind(), FaultKind::Transient, "{}", error.chain());
    store.commit(kept).await.unwrap();
    assert_eq!(store.settle(&fencing_tokens, &[done]).await.unwrap().applied.len(), 1);
}

#[tokio::test]
async fn a_deferred_constraint_fails_the_commit_and_leaves_no_open_transaction() {
    let file = File::new();
    let options = SqliteConnectOptions::new().filename(file.path()).create_if_missing(true);
    let pool = SqlitePoolOptions::new().max_connections(1).connect_with(options).await.unwrap();
    let store = Arc::new(open(&pool).await);
    let tables = "CREATE TABLE parent (id INTEGER PRIMARY KEY);
         CREATE TABLE child (id INTEGER REFERENCES parent (id) DEFERRABLE INITIALLY DEFERRED)";
    sqlx::raw_sql(tables).execute(&pool).await.unwrap();
    let mut transaction = store.begin().await.unwrap();
    sqlx::query("INSERT INTO child VALUES (1)").execute(&mut *transaction).await.unwrap();
    store.insert(&mut transaction, &[&event("1", "t", "{}")], None).await.unwrap();
    let error = store.commit(transaction).await.unwrap_err();
    assert_eq!(error.kind(), FaultKind::Permanent, "it is known not to have committed: {}", error.chain());
    assert!(store.find("1").await.unwrap().is_none());
    let mut next = store.begin().await.unwrap();
    store.insert(&mut next, &[&event("1", "t", "{}")], None).await.unwrap();
    store.commit(next).await.unwrap();
    assert!(store.find("1").await.unwrap().is_some());
}

/// For example after a full disk: SQLite has ended the transaction, and sqlx does not know it.
#[tokio::test]
async fn a_connection_whose_transaction_sqlite_ended_is_replaced() {
    let file = File::new();
    let options = SqliteConnectOptions::new().filename(file.path()).create_if_missing(true);
    let pool = SqlitePoolOptions::new().max_connections(2).connect_with(options).await.unwrap();
    let store = open(&pool).await;
    for commits in [true, false] {
        let mut transaction = store.begin().await.unwrap();
        store.insert(&mut transaction, &[&event("1", "t", "{}")], None).await.unwrap();
        sqlx::query("ROLLBACK").execute(&mut *transaction).await.unwrap();
        match commits {
            true => assert_eq!(store.commit(transaction).await.unwrap_err().kind(), FaultKind::Transient),
            false => drop(transaction),
        }
        for id in ["2", "3"] {
            let mut next = store.begin().await.unwrap();
            store.insert(&mut next, &[&event(&format!("{id}-{commits}"), "t", "{}")], None).await.unwrap();
            store.commit(next).await.unwrap();
            assert!(store.find(&format!("{id}-{commits}")).await.unwrap().is_some());
        }
    }
    assert!(store.find("1").await.unwrap().is_none());
}
