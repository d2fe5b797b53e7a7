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
#[doc(hidden)]
pub use table::{MemoryTable, Row};
pub use transaction::{MemoryConnection, MemoryTransaction};

/// An in-memory database that has only outbox tables. It tests the whole life of an event without a real database.
///
/// Give it to [`Outbox::new`](posthaste_core::outbox::Outbox::new) in place of a connection pool. Clones share the same
/// database. It uses tokio's clock, so a test that pauses the clock also controls leases and due times.
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
    /// The time of its creation by tokio's clock and by the wall clock. Its clock is the wall clock of that moment plus
    /// the time that has passed on tokio's clock.
    made: (Instant, i64),
    state: Mutex<State>,
}

/// The contents of the database, and the faults that a test asked for.
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
    /// An empty database.
    pub fn new() -> Self {
        let made = (Instant::now(), Utc::now().timestamp_micros());
        Self(Arc::new(Shared { made, state: Mutex::default() }))
    }

    /// Begins a transaction of the service, like a transaction of sqlx: the outbox cannot see its end.
    pub async fn begin(&self) -> Result<MemoryTransaction, StoreError> {
        drop(self.statement("begin a transaction")?);
        Ok(MemoryTransaction::new(self.clone()))
    }

    /// All rows of a table, in the order of their numbers. Empty if no outbox has opened the table.
    pub fn rows(&self, table: &str) -> Vec<OutboxRow> {
        self.look(table, |table| table.rows().map(|row| row.as_seen()).collect()).unwrap_or_default()
    }

    /// The next commits fail and change nothing.
    pub fn fail_commits(&self, count: usize) {
        self.lock().failing_commits = count;
    }

    /// The next commits are applied, but their answers are lost: the caller gets an error with an unknown outcome.
    pub fn lose_commits(&self, count: usize) {
        self.lock().lost_commits = count;
    }

    /// The next statements fail as if the database were out of reach.
    pub fn refuse(&self, statements: usize) {
        self.lock().refusals = statements;
    }

    /// The number of transactions that committed.
    pub fn commits(&self) -> usize {
        self.lock().commits
    }

    /// The number of transactions that were rolled back or dropped.
    pub fn rollbacks(&self) -> usize {
        self.lock().rollbacks
    }

    /// The database's clock, in microseconds since 1970.
    #[doc(hidden)]
    pub fn now(&self) -> i64 {
        let (instant, micros) = self.0.made;
        micros.saturating_add(in_micros(instant.elapsed()))
    }

    #[doc(hidden)]
    pub fn look<R>(&self, table: &str, look: impl FnOnce(&MemoryTable) -> R) -> Option<R> {
        self.lock().tables.get(table).map(look)
    }

    /// Locks the state for one statement, or refuses the statement if a test asked for that.
    fn statement(&self, doing: &str) -> Result<MutexGuard<'_, State>, StoreError> {
        let mut state = self.lock();
        match state.refusals {
            0 => Ok(state),
            _ => {
                state.refusals -= 1;
                Err(StoreError::new(doing, FaultKind::Transient, "a test made the in-memory database refuse"))
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
            None => unreachable!("the table was just inserted"),
        }
    }
}

#[async_trait]
impl Pool<MemoryOutbox> for MemoryDatabase {
    async fn open(&self, table: TableName, mode: Mode) -> Result<MemoryOutbox, OpenError> {
        self.statement("open an outbox table")?.table(&table);
        Ok(MemoryOutbox::new(self.clone(), table, mode))
    }

    /// The tables of this database need no migrations.
    async fn open_existing(&self, table: TableName, mode: Mode) -> Result<MemoryOutbox, OpenError> {
        self.open(table, mode).await
    }
}

/// Limits the time to a century, because microseconds of `Duration::MAX` do not fit.
fn in_micros(time: Duration) -> i64 {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    time.min(CENTURY).as_micros() as i64
}

fn date(micros: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_micros(micros).unwrap_or(DateTime::<Utc>::MAX_UTC)
}
