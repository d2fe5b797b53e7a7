#![allow(dead_code)]
//! A database of each kind for one test, and what tests have in common.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use chrono::TimeDelta;
use posthaste::{Event, InTransaction, Listeners, Mode, Outbox, OutboxBuilder, OutboxRow, OutboxStatus, Pool};
use posthaste_core::outbox::{Store, WriteStore};
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

mod by_hand;
mod memory;
mod metrics;
mod mysql;
mod postgres;
mod sqlite;
mod watched;

pub use by_hand::{
    CHANNEL_MODES, MODES, Marks, channels, claim, claim_soon, claimed_ids, dispatcher, failure, insert, is_idle, node,
    retry, settle, settle_all, snooze, table_of, write_to,
};
pub use memory::Memory;
pub use metrics::Meters;
pub use mysql::MySql;
pub use postgres::Postgres;
pub use sqlite::Sqlite;
pub use watched::{Book, Watched, WatchedPool};

/// How long a test waits for what must happen before it gives up.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// How long a lease lasts in tests that wait for none to end.
pub const LEASE: Duration = Duration::from_secs(30);
pub const HOUR: Duration = Duration::from_secs(60 * 60);
pub const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A new, empty database.
#[async_trait]
pub trait Harness: Sized + Send + Sync + 'static {
    type Store: Store;
    type Pool: Pool<Self::Store> + Clone;
    /// A transaction of the service's own making.
    type Plain: InTransaction<Self::Store>;

    /// How fine the times are that it keeps.
    const TICK: TimeDelta = TimeDelta::microseconds(1);
    /// The modes in which a claim does not wait for a transaction that writes.
    const CLAIMS_BESIDE_A_WRITER: &'static [Mode] = &MODES;

    async fn start() -> Self;

    /// The connections of one process; each call is another process.
    async fn pool(&self) -> Self::Pool;

    async fn begin_plain(pool: &Self::Pool) -> Self::Plain;

    async fn commit_plain(transaction: Self::Plain);

    /// How many connections of a pool are in use now.
    fn in_use(pool: &Self::Pool) -> usize;

    /// Does what only another program, or the database's clock, would do to the table `outbox_event`.
    async fn tamper(&self, tamper: Tamper<'_>);
}

/// A database that other programs reach with SQL.
#[async_trait]
pub trait Database: Harness {
    /// How a backslash is written in a text.
    const BACKSLASH: &'static str = "\\";
    /// How large a payload its functions can make.
    const HUGE: usize = 20_000_000;

    async fn execute(&self, sql: &str);

    /// The one text that a query answers.
    async fn text(&self, sql: &str) -> Option<String>;

    /// The texts that a query answers, row by row.
    async fn texts(&self, sql: &str) -> Vec<String>;

    /// Executes on a connection of the service, so in its transaction.
    async fn execute_on(connection: &mut <Self::Store as WriteStore>::Connection, sql: &str);

    /// What to select the numbers from 1 to `count` from, as a column `n`.
    fn numbers(count: u64) -> String;

    /// The time this long before now, as the columns of an outbox keep it.
    fn ago(age: Duration) -> String;

    /// So many bytes, all of them zero.
    fn zeros(count: usize) -> String;

    /// A text of so many digits.
    fn digits(count: usize) -> String;
}

/// What another program may do to a table.
pub enum Tamper<'a> {
    /// Writes headers that are no JSON object.
    BreakHeaders { event_id: &'a str },
    /// Lets a row have been written, finished and leased that much earlier.
    Age { event_id: &'a str, by: Duration },
    /// Sets the database's clock back, as far as leases can tell: every lease began that much later than now.
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

/// Declares tests that run on every database that lets many write at once.
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

/// What listeners were called with, of all nodes together and in order.
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

    /// How often each event was delivered.
    pub fn counts(&self) -> HashMap<String, usize> {
        let mut counts = HashMap::new();
        for id in self.ids() {
            *counts.entry(id).or_default() += 1;
        }
        counts
    }

    /// Waits until so many deliveries have been made.
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

    /// Listeners for events of the type `t` with and without an aggregate, that record the call and succeed.
    pub fn listeners(&self) -> Listeners {
        self.slow_listeners(Duration::ZERO)
    }

    /// The same, and they take their time after the call is recorded.
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

    /// The same, and they wait at a gate after the call is recorded.
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

/// What listeners wait at until it is opened, for good.
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
        assert!(self.0.acquire().await.is_err(), "it is opened and never passed one by one");
    }
}

/// An outbox whose table is asked so rarely that only a hint can have brought what a test sees.
pub async fn outbox<H: Harness>(
    db: &H,
    calls: &Calls,
    build: impl FnOnce(OutboxBuilder<H::Pool, H::Store>) -> OutboxBuilder<H::Pool, H::Store>,
) -> Outbox<H::Store> {
    let builder = Outbox::new(db.pool().await).listeners(calls.listeners()).poll_interval(Duration::from_secs(60));
    build(builder).start().await.unwrap()
}

/// One that only writes.
pub async fn writer<H: Harness>(db: &H) -> Outbox<H::Store> {
    Outbox::new(db.pool().await).mode(Mode::WriterOnly).start().await.unwrap()
}

/// One that only writes, to a table of its own.
pub async fn writer_of<H: Harness>(db: &H, table: &str) -> Outbox<H::Store> {
    Outbox::new(db.pool().await).mode(Mode::WriterOnly).table(table).start().await.unwrap()
}

/// A pool whose stores keep book.
pub async fn watched<H: Harness>(db: &H) -> (WatchedPool<H::Pool>, Book) {
    let book = Book::default();
    (WatchedPool { pool: db.pool().await, book: book.clone() }, book)
}

/// An event of the type `t`.
pub fn event() -> Event {
    Event::text("t", "{}").build().unwrap()
}

/// Several of them.
pub fn events(count: usize) -> Vec<Event> {
    (0..count).map(|_| event()).collect()
}

/// An event of the type `t` with an id of the test's own.
pub fn named(id: &str) -> Event {
    Event::text("t", "{}").id(id.to_owned()).build().unwrap()
}

/// An event of the type `t` of one aggregate of the type `a`.
pub fn event_of(aggregate_id: &str) -> Event {
    Event::text("t", "{}").aggregate("a", aggregate_id).build().unwrap()
}

/// Writes events in one transaction of the outbox's own.
pub async fn write<S: Store>(outbox: &Outbox<S>, events: &[Event]) -> Vec<String> {
    let mut transaction = outbox.begin().await.unwrap();
    let ids = outbox.write_all(&mut transaction, events).await.unwrap();
    transaction.commit().await.unwrap();
    ids
}

/// Writes events in one transaction whose end the outbox cannot see, so that nothing is born claimed.
pub async fn write_plain<H: Harness>(db: &H, outbox: &Outbox<H::Store>, events: &[Event]) -> Vec<String> {
    let pool = db.pool().await;
    let mut transaction = H::begin_plain(&pool).await;
    let ids = outbox.write_all(&mut transaction, events).await.unwrap();
    H::commit_plain(transaction).await;
    outbox.committed();
    ids
}

/// The row of an event once `is_so` is true of it.
pub async fn row_when<S: Store>(outbox: &Outbox<S>, event_id: &str, is_so: impl Fn(&OutboxRow) -> bool) -> OutboxRow {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let row = outbox.find(event_id).await.unwrap();
        if let Some(row) = row.clone().filter(|row| is_so(row)) {
            return row;
        }
        assert!(Instant::now() < deadline, "it did not become so in time: {row:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The row of an event, which is there.
pub async fn row<S: Store>(outbox: &Outbox<S>, event_id: &str) -> OutboxRow {
    outbox.find(event_id).await.unwrap().unwrap()
}

/// Waits until all of them are done.
pub async fn all_done<S: Store>(outbox: &Outbox<S>, ids: &[String]) {
    for id in ids {
        row_when(outbox, id, |row| row.status == OutboxStatus::Done).await;
    }
}

/// Asks until the answer is yes.
pub async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so().await {
        assert!(Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until a pool has all its connections back: they come back by themselves, a moment later.
pub async fn all_back<H: Harness>(pool: &H::Pool) {
    until("every connection is back", async || H::in_use(pool) == 0).await;
}
