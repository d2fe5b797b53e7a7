use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use posthaste_core::outbox::{Mode, OpenError, OutboxRow, Pool, TableName};
use posthaste_core::{FaultKind, StoreError, lock};
use tokio::time::Instant;

mod claim;
mod operator;
mod outbox;
mod table;
mod tamper;
mod transaction;

pub use outbox::MemoryOutbox;
pub(crate) use table::MemoryTable;
pub use transaction::{MemoryConnection, MemoryTransaction};

/// A database of nothing but outbox tables, in memory: the whole life of an event, to test a service without a database.
///
/// Give it to [`Outbox::new`](posthaste_core::outbox::Outbox::new) in place of a pool of connections. Clones are the same
/// database. It lives on tokio's clock, so a test that pauses the clock also owns leases and due times.
///
/// ```
/// use posthaste_core::Event;
/// use posthaste_core::outbox::{Mode, Outbox, OutboxStatus};
/// use posthaste_testing::MemoryDatabase;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let database = MemoryDatabase::new();
/// let outbox = Outbox::new(database.clone()).mode(Mode::WriterOnly).start().await?;
/// let mut transaction = outbox.begin().await?;
/// outbox.write(&mut transaction, Event::text("order.placed", "{}")).await?;
/// assert!(database.rows("outbox_event").is_empty());
/// transaction.commit().await?;
/// assert_eq!(database.rows("outbox_event")[0].status, OutboxStatus::New);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct MemoryDatabase(Arc<Shared>);

struct Shared {
    /// When it was made, by both clocks: times are the second, moved by what has passed on the first.
    made: (Instant, i64),
    state: Mutex<State>,
}

/// Everything in it.
#[derive(Default)]
pub(crate) struct State {
    tables: HashMap<String, MemoryTable>,
    failing_commits: usize,
    lost_commits: usize,
    refusals: usize,
    commits: usize,
    rollbacks: usize,
}

impl Default for MemoryDatabase {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryDatabase {
    /// An empty one.
    pub fn new() -> Self {
        let made = (Instant::now(), Utc::now().timestamp_micros());
        Self(Arc::new(Shared { made, state: Mutex::default() }))
    }

    /// Begins a transaction of the service, as one of sqlx would be: the outbox cannot see its end.
    pub async fn begin(&self) -> Result<MemoryTransaction, StoreError> {
        drop(self.statement("begin a transaction")?);
        Ok(MemoryTransaction::new(self.clone()))
    }

    /// All rows of a table, in the order of their numbers; none where nobody opened it.
    pub fn rows(&self, table: &str) -> Vec<OutboxRow> {
        self.look(table, |table| table.rows().map(|row| row.as_seen()).collect()).unwrap_or_default()
    }

    /// The next commits fail, and nothing of them is applied.
    pub fn fail_commits(&self, count: usize) {
        self.lock().failing_commits = count;
    }

    /// The next commits are applied, but who asked for them never learns it: their outcome is unknown.
    pub fn lose_commits(&self, count: usize) {
        self.lock().lost_commits = count;
    }

    /// The next statements fail as if the database were out of reach.
    pub fn refuse(&self, statements: usize) {
        self.lock().refusals = statements;
    }

    /// How many transactions have committed.
    pub fn commits(&self) -> usize {
        self.lock().commits
    }

    /// How many transactions were rolled back, or dropped.
    pub fn rollbacks(&self) -> usize {
        self.lock().rollbacks
    }

    /// The database's clock, in microseconds since 1970.
    pub(crate) fn now(&self) -> i64 {
        let (instant, micros) = self.0.made;
        micros.saturating_add(in_micros(instant.elapsed()))
    }

    pub(crate) fn look<R>(&self, table: &str, look: impl FnOnce(&MemoryTable) -> R) -> Option<R> {
        self.lock().tables.get(table).map(look)
    }

    /// The state, for one statement.
    fn statement(&self, doing: &str) -> Result<MutexGuard<'_, State>, StoreError> {
        let mut state = self.lock();
        match state.refusals {
            0 => Ok(state),
            _ => {
                state.refusals -= 1;
                Err(StoreError::new(doing, FaultKind::Transient, "the database in memory was told to refuse"))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }

    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl State {
    fn table(&mut self, name: &TableName) -> &mut MemoryTable {
        if !self.tables.contains_key(name.as_str()) {
            self.tables.insert(name.as_str().to_owned(), MemoryTable::default());
        }
        match self.tables.get_mut(name.as_str()) {
            Some(table) => table,
            None => unreachable!("it is there now"),
        }
    }
}

#[async_trait]
impl Pool<MemoryOutbox> for MemoryDatabase {
    async fn open(&self, table: TableName, mode: Mode) -> Result<MemoryOutbox, OpenError> {
        self.statement("open an outbox table")?.table(&table);
        Ok(MemoryOutbox::new(self.clone(), table, mode))
    }
}

/// A wait without end is one that no test outlives.
fn in_micros(time: Duration) -> i64 {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    time.min(CENTURY).as_micros() as i64
}

fn date(micros: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_micros(micros).unwrap_or(DateTime::<Utc>::MAX_UTC)
}
