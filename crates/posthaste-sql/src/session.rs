use std::ops::{Deref, DerefMut};
use std::time::Duration;

use sqlx::pool::PoolOptions;
use sqlx::{Database, Execute, Executor, Pool};
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::Instant;

/// A connection that was not used for longer than this is not trusted: a firewall may have orphaned it without a word.
const LONGEST_IDLE: Duration = Duration::from_secs(60);

/// A connection of the outbox's own, beside the service's pool, for one kind of statement.
///
/// The service cannot use it up: a service that holds every connection of its pool must not keep the outbox from renewing
/// its leases. A statement that fails or is cut off closes the connection, and the next one opens another: no state of a
/// broken one survives, and a connection that hangs holds up nobody.
///
/// A connection belongs to the runtime that opened it, so a session is used from one runtime only.
pub(crate) struct Session<DB: Database> {
    /// Opens connections as the service's pool does, with its options and its hooks, and keeps none.
    connector: Pool<DB>,
    idle: Mutex<Option<Idle<DB>>>,
}

struct Idle<DB: Database> {
    connection: DB::Connection,
    since: Instant,
}

impl<DB: Database> Session<DB> {
    /// Connects when it is first used.
    pub(crate) fn beside(pool: &Pool<DB>) -> Self {
        let options: PoolOptions<DB> = pool.options().clone();
        let options = options.min_connections(0).max_connections(1).idle_timeout(None).max_lifetime(None);
        let connector = options.connect_lazy_with((*pool.connect_options()).clone());
        Self { connector, idle: Mutex::new(None) }
    }

    /// Begins a transaction with this statement.
    pub(crate) async fn begin(&self, statement: &'static str) -> Result<Work<'_, DB>, sqlx::Error>
    where
        for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    {
        let mut slot = self.idle.lock().await;
        // What has been idle may have been closed by the server. Nothing has happened yet, so a new one may try again.
        if let Some(idle) = slot.take().filter(|idle| idle.since.elapsed() < LONGEST_IDLE) {
            let mut connection = idle.connection;
            if (&mut connection).execute(sqlx::raw_sql(statement)).await.is_ok() {
                return Ok(Work { slot, connection: Some(connection) });
            }
        }
        let mut connection = self.connector.acquire().await?.detach();
        (&mut connection).execute(sqlx::raw_sql(statement)).await?;
        Ok(Work { slot, connection: Some(connection) })
    }

    /// Runs something outside of a transaction: one message, which the server carries out by itself, however long this
    /// process takes to read the answer.
    pub(crate) async fn fetch<'q, E>(&self, statement: E) -> Result<Vec<DB::Row>, sqlx::Error>
    where
        E: Execute<'q, DB> + 'q,
        for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    {
        let mut slot = self.idle.lock().await;
        let mut connection = match slot.take().filter(|idle| idle.since.elapsed() < LONGEST_IDLE) {
            Some(idle) => idle.connection,
            None => self.connector.acquire().await?.detach(),
        };
        let rows = (&mut connection).fetch_all(statement).await?;
        *slot = Some(Idle { connection, since: Instant::now() });
        Ok(rows)
    }
}

/// A transaction on a session. Dropped without a commit it is rolled back: its connection is closed.
pub(crate) struct Work<'s, DB: Database> {
    slot: MutexGuard<'s, Option<Idle<DB>>>,
    /// `None` once it is ended.
    connection: Option<DB::Connection>,
}

/// Why a transaction of a session failed: what is to be said of it depends on whether its COMMIT was under way.
#[derive(Debug)]
pub(crate) enum Failed {
    /// Before that: nothing has happened.
    Statement(sqlx::Error),
    /// Nobody knows whether it committed.
    Commit(sqlx::Error),
}

impl From<sqlx::Error> for Failed {
    fn from(error: sqlx::Error) -> Self {
        Self::Statement(error)
    }
}

impl<DB: Database> Work<'_, DB> {
    /// Makes it permanent.
    pub(crate) async fn commit(mut self) -> Result<(), Failed>
    where
        for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    {
        if let Some(mut connection) = self.connection.take() {
            (&mut connection).execute(sqlx::raw_sql("COMMIT")).await.map_err(Failed::Commit)?;
            *self.slot = Some(Idle { connection, since: Instant::now() });
        }
        Ok(())
    }
}

impl<DB: Database> Deref for Work<'_, DB> {
    type Target = DB::Connection;

    fn deref(&self) -> &DB::Connection {
        match &self.connection {
            Some(connection) => connection,
            None => unreachable!("only a commit takes it, and it takes all"),
        }
    }
}

impl<DB: Database> DerefMut for Work<'_, DB> {
    fn deref_mut(&mut self) -> &mut DB::Connection {
        match &mut self.connection {
            Some(connection) => connection,
            None => unreachable!("only a commit takes it, and it takes all"),
        }
    }
}
