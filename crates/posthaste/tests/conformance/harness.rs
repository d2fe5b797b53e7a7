#![allow(dead_code)]
//! A new database of each kind for one test, and the helpers that tests share.

use std::collections::HashMap;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use chrono::TimeDelta;
use posthaste::{Event, InTransaction, Listeners, Mode, Outbox, OutboxBuilder, OutboxRow, OutboxStatus, Pool};
use posthaste_core::outbox::{Store, WriteStore};
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

mod manual_claims;
mod memory;
mod metrics;
mod mysql;
mod postgres;
mod sqlite;
mod watched_store;

pub use manual_claims::{
    CHANNEL_MODES, MODES, RowSettler, channels, claim, claim_soon, claimed_ids, dispatcher, failure, insert, is_idle,
    node, retry, settle, settle_all, snooze, table_of, write_to,
};
pub use memory::Memory;
pub use metrics::Metrics;
pub use mysql::MySql;
pub use postgres::Postgres;
pub use sqlite::Sqlite;
pub use watched_store::{CallLog, Watched, WatchedPool};

/// The time after which a test stops waiting and fails.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// The lease in tests that do not wait for the end of a lease.
pub const LEASE: Duration = Duration::from_secs(30);
pub const HOUR: Duration = Duration::from_secs(60 * 60);
pub const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A new, empty database.
#[async_trait]
pub trait Harness: Sized + Send + Sync + 'static {
    type Store: Store;
    type Pool: Pool<Self::Store> + Clone;
    /// A transaction that the service began without the outbox.
    type Plain: InTransaction<Self::Store>;

    /// The resolution of stored times.
    const TICK: TimeDelta = TimeDelta::microseconds(1);
    /// The modes in which a claim does not wait for a writing transaction.
    const CLAIMS_BESIDE_A_WRITER: &'static [Mode] = &MODES;

    async fn start() -> Self;

    /// The connection pool of one process; each call stands for another process.
    async fn pool(&self) -> Self::Pool;

    async fn begin_plain(pool: &Self::Pool) -> Self::Plain;

    async fn commit_plain(transaction: Self::Plain);

    /// The number of connections of a pool that are in use.
    fn in_use(pool: &Self::Pool) -> usize;

    /// Changes the table `outbox_event` as only another program, or the database's clock, would.
    async fn tamper(&self, tamper: Tamper<'_>);
}

/// Plain SQL, as any other program would run it.
#[async_trait]
pub trait SqlAccess: Harness {
    async fn execute(&self, sql: &str);

    /// The one text that a query returns.
    async fn text(&self, sql: &str) -> Option<String>;

    /// The texts that a query returns, row by row.
    async fn texts(&self, sql: &str) -> Vec<String>;

    /// Executes on a connection of the service, so in its transaction.
    async fn execute_on(connection: &mut <Self::Store as WriteStore>::Connection, sql: &str);
}

/// Implements [`SqlAccess`] for a harness with a pool `outsider`.
macro_rules! sql_access {
    ($harness:ty, $connection:ty) => {
        #[async_trait::async_trait]
        impl crate::harness::SqlAccess for $harness {
            async fn execute(&self, sql: &str) {
                sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&self.outsider).await.unwrap();
            }

            async fn text(&self, sql: &str) -> Option<String> {
                sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_one(&self.outsider).await.unwrap()
            }

            async fn texts(&self, sql: &str) -> Vec<String> {
                sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_all(&self.outsider).await.unwrap()
            }

            async fn execute_on(connection: &mut $connection, sql: &str) {
                sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(connection).await.unwrap();
            }
        }
    };
}
pub(crate) use sql_access;

/// A database that other programs reach with SQL.
pub trait Database: Harness + SqlAccess {
    /// A backslash in an SQL text.
    const BACKSLASH: &'static str = "\\";
    /// The size of the largest payload that its SQL functions can make.
    const HUGE: usize = 20_000_000;

    /// What follows a time in a text to say that it is in UTC.
    const UTC: &'static str;

    /// The command-line client of this database, to be given SQL as the last argument.
    fn client(&self) -> Command;

    /// A FROM clause with the numbers from 1 to `count`, as a column `n`.
    fn numbers(count: u64) -> String;

    /// SQL for the time this long before now, as the columns of an outbox store it.
    fn ago(age: Duration) -> String;

    /// SQL for this many zero bytes.
    fn zeros(count: usize) -> String;

    /// SQL for a text of this many digits.
    fn digits(count: usize) -> String;
}

/// Changes that another program may make to a table.
pub enum Tamper<'a> {
    /// Writes headers that are not a JSON object.
    BreakHeaders { event_id: &'a str },
    /// Moves the times at which a row was written, finished and leased back by this much.
    Age { event_id: &'a str, by: Duration },
    /// Simulates a database clock that was set back: every lease began this much later.
    SetClockBack { by: Duration },
}

/// Declares tests that run on every store.
macro_rules! on_every_store {
    ($($test:ident),* $(,)?) => {
        mod postgres { $(crate::harness::declare!(Postgres, $test);)* }
        mod mysql { $(crate::harness::declare!(MySql, $test);)* }
        mod sqlite { $(crate::harness::declare!(Sqlite, $test);)* }
        mod memory { $(crate::harness::declare!(Memory, $test);)* }
    };
}
pub(crate) use on_every_store;

/// Declares tests that run on every store that other programs reach with SQL.
macro_rules! on_every_database {
    ($($test:ident),* $(,)?) => {
        mod on_postgres { $(crate::harness::declare!(Postgres, $test);)* }
        mod on_mysql { $(crate::harness::declare!(MySql, $test);)* }
        mod on_sqlite { $(crate::harness::declare!(Sqlite, $test);)* }
    };
}
pub(crate) use on_every_database;

/// Declares tests that run on every database that allows several writers at once.
macro_rules! on_every_server {
    ($($test:ident),* $(,)?) => {
        mod on_server_postgres { $(crate::harness::declare!(Postgres, $test);)* }
        mod on_server_mysql { $(crate::harness::declare!(MySql, $test);)* }
    };
}
pub(crate) use on_every_server;

macro_rules! declare {
    ($harness:ident, $test:ident) => {
        #[tokio::test(flavor = "multi_thread")]
        async fn $test() {
            super::$test(<crate::harness::$harness as crate::harness::Harness>::start().await).await;
        }
    };
}
pub(crate) use declare;

/// The events that listeners were called with, of all nodes together and in order.
#[derive(Clone, Default)]
pub struct Calls(Arc<(Mutex<Vec<Arc<Event>>>, Notify)>);

impl Calls {
    pub fn add(&self, event: Arc<Event>) {
        self.0.0.lock().unwrap().push(event);
        self.0.1.notify_waiters();
    }

    pub fn events(&self) -> Vec<Arc<Event>> {
        self.0.0.lock().unwrap().clone()
    }

    pub fn len(&self) -> usize {
        self.0.0.lock().unwrap().len()
    }

    pub fn ids(&self) -> Vec<String> {
        self.events().iter().map(|event| event.id().to_owned()).collect()
    }

    /// The number of deliveries of each event.
    pub fn counts(&self) -> HashMap<String, usize> {
        let mut counts = HashMap::new();
        for id in self.ids() {
            *counts.entry(id).or_default() += 1;
        }
        counts
    }

    /// Waits until this many deliveries were made.
    pub async fn wait_for(&self, deliveries: usize) {
        let enough = async {
            loop {
                let called = self.0.1.notified();
                if self.len() >= deliveries {
                    return;
                }
                called.await;
            }
        };
        let in_time = tokio::time::timeout(PATIENCE, enough).await;
        assert!(in_time.is_ok(), "{} of {deliveries} deliveries were made in time", self.len());
    }

    /// Listeners for events of the type `t`, with and without an aggregate, that note the call and succeed.
    pub fn listeners(&self) -> Listeners {
        self.slow_listeners(Duration::ZERO)
    }

    /// The same, but each listener sleeps after it noted the call.
    pub fn slow_listeners(&self, time: Duration) -> Listeners {
        let listener = |calls: Calls| {
            move |event| {
                let calls = calls.clone();
                async move {
                    calls.add(event);
                    if !time.is_zero() {
                        tokio::time::sleep(time).await;
                    }
                }
            }
        };
        let listeners = Listeners::new().on("t", listener(self.clone())).unwrap();
        listeners.on_aggregate("a", "t", listener(self.clone())).unwrap()
    }

    /// The same, but each listener waits at a gate after it noted the call.
    pub fn gated_listeners(&self, gate: &Gate) -> Listeners {
        let listener = |calls: Calls, gate: Gate| {
            move |event| {
                let (calls, gate) = (calls.clone(), gate.clone());
                async move {
                    calls.add(event);
                    gate.pass().await;
                }
            }
        };
        let listeners = Listeners::new().on("t", listener(self.clone(), gate.clone())).unwrap();
        listeners.on_aggregate("a", "t", listener(self.clone(), gate.clone())).unwrap()
    }
}

/// A gate at which listeners wait until the test opens it. It does not close again.
#[derive(Clone)]
pub struct Gate(Arc<Semaphore>);

impl Gate {
    pub fn closed() -> Self {
        Self(Arc::new(Semaphore::new(0)))
    }

    pub fn open(&self) {
        self.0.close();
    }

    pub async fn pass(&self) {
        assert!(self.0.acquire().await.is_err(), "the gate hands out no permits");
    }
}

/// An outbox that polls so rarely that a test sees only deliveries caused by the hot path or a wakeup.
pub async fn outbox<H: Harness>(
    db: &H,
    calls: &Calls,
    build: impl FnOnce(OutboxBuilder<H::Pool, H::Store>) -> OutboxBuilder<H::Pool, H::Store>,
) -> Outbox<H::Store> {
    let builder = Outbox::new(db.pool().await).listeners(calls.listeners()).poll_interval(Duration::from_secs(60));
    build(builder).start().await.unwrap()
}

/// An outbox that only writes.
pub async fn writer<H: Harness>(db: &H) -> Outbox<H::Store> {
    Outbox::new(db.pool().await).mode(Mode::WriterOnly).start().await.unwrap()
}

/// An outbox that only writes, to a table of this name.
pub async fn writer_of<H: Harness>(db: &H, table: &str) -> Outbox<H::Store> {
    Outbox::new(db.pool().await).mode(Mode::WriterOnly).table(table).start().await.unwrap()
}

/// A pool whose stores log their calls.
pub async fn watched<H: Harness>(db: &H) -> (WatchedPool<H::Pool>, CallLog) {
    let call_log = CallLog::default();
    (WatchedPool { pool: db.pool().await, call_log: call_log.clone() }, call_log)
}

/// An event of the type `t`.
pub fn event() -> Event {
    Event::text("t", "{}").build().unwrap()
}

/// Several such events.
pub fn events(count: usize) -> Vec<Event> {
    (0..count).map(|_| event()).collect()
}

/// An event of the type `t` with this id.
pub fn named(id: &str) -> Event {
    Event::text("t", "{}").id(id.to_owned()).build().unwrap()
}

/// An event of the type `t` of one aggregate of the type `a`.
pub fn event_of(aggregate_id: &str) -> Event {
    Event::text("t", "{}").aggregate("a", aggregate_id).build().unwrap()
}

/// Writes events in one transaction that the outbox began.
pub async fn write<S: Store>(outbox: &Outbox<S>, events: &[Event]) -> Vec<String> {
    let mut transaction = outbox.begin().await.unwrap();
    let ids = outbox.write_all(&mut transaction, events).await.unwrap();
    transaction.commit().await.unwrap();
    ids
}

/// Writes events in one transaction that the service began. The outbox does not see its end, so no row is pre-claimed.
pub async fn write_plain<H: Harness>(db: &H, outbox: &Outbox<H::Store>, events: &[Event]) -> Vec<String> {
    let pool = db.pool().await;
    let mut transaction = H::begin_plain(&pool).await;
    let ids = outbox.write_all(&mut transaction, events).await.unwrap();
    H::commit_plain(transaction).await;
    outbox.committed();
    ids
}

/// Waits until the row of an event fulfils `is_so`, and returns the row.
pub async fn row_when<S: Store>(outbox: &Outbox<S>, event_id: &str, is_so: impl Fn(&OutboxRow) -> bool) -> OutboxRow {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let row = outbox.find(event_id).await.unwrap();
        if let Some(row) = row.clone().filter(|row| is_so(row)) {
            return row;
        }
        assert!(Instant::now() < deadline, "the row did not change in time: {row:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The row of an event that exists.
pub async fn row<S: Store>(outbox: &Outbox<S>, event_id: &str) -> OutboxRow {
    outbox.find(event_id).await.unwrap().unwrap()
}

/// Waits until all these events are done.
pub async fn all_done<S: Store>(outbox: &Outbox<S>, ids: &[String]) {
    for id in ids {
        row_when(outbox, id, |row| row.status == OutboxStatus::Done).await;
    }
}

/// Checks a condition repeatedly until it is true.
pub async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so().await {
        assert!(Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until no connection of a pool is in use: connections return to the pool with a short delay.
pub async fn all_back<H: Harness>(pool: &H::Pool) {
    until("every connection is back in the pool", async || H::in_use(pool) == 0).await;
}
