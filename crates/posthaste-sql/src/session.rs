use std::ops::{Deref, DerefMut};
use std::sync::Mutex;
use std::time::Duration;

use posthaste_core::lock;
use sqlx::pool::PoolOptions;
use sqlx::{Database, Execute, Executor, Pool};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

/// A connection that was idle for longer than this is not used again: a firewall may have dropped it without notice.
const LONGEST_IDLE: Duration = Duration::from_secs(60);

/// One connection or a few that Posthaste owns, outside the service's pool, for one kind of statement.
///
/// The service cannot exhaust them: a service that uses every connection of its pool must not keep the outbox from
/// renewing its leases. A statement that fails or is cancelled closes the connection, and the next statement opens a
/// new one. So no state of a broken connection survives, and a connection that hangs delays nothing once its statement
/// is cancelled.
///
/// A connection belongs to the runtime that opened it, so a session is used from one runtime only.
pub(crate) struct Session<DB: Database> {
    /// Opens connections with the options and hooks of the service's pool, and keeps none.
    connector: Pool<DB>,
    /// One for each connection that may be open.
    permits: Semaphore,
    idle: Mutex<Vec<Idle<DB>>>,
}

struct Idle<DB: Database> {
    connection: DB::Connection,
    since: Instant,
}

impl<DB: Database> Session<DB> {
    /// One connection. Connects when it is first used.
    pub(crate) fn beside(pool: &Pool<DB>) -> Self {
        Self::with_connections(pool, 1)
    }

    /// At most this many connections, for statements that run at the same time.
    pub(crate) fn with_connections(pool: &Pool<DB>, connections: u32) -> Self {
        let options: PoolOptions<DB> = pool.options().clone();
        let options = options.min_connections(0).max_connections(connections).idle_timeout(None).max_lifetime(None);
        let connector = options.connect_lazy_with((*pool.connect_options()).clone());
        Self { connector, permits: Semaphore::new(connections as usize), idle: Mutex::default() }
    }

    /// The right to use one connection, and the connection that was used last, unless it was idle for too long.
    async fn acquire(&self) -> Result<(SemaphorePermit<'_>, Option<DB::Connection>), sqlx::Error> {
        let permit = self.permits.acquire().await.map_err(|_| sqlx::Error::PoolClosed)?;
        let mut idle = lock(&self.idle);
        idle.retain(|idle| idle.since.elapsed() < LONGEST_IDLE);
        Ok((permit, idle.pop().map(|idle| idle.connection)))
    }

    fn keep(&self, connection: DB::Connection) {
        lock(&self.idle).push(Idle { connection, since: Instant::now() });
    }

    /// Begins a transaction with this statement.
    pub(crate) async fn begin(&self, statement: &'static str) -> Result<Work<'_, DB>, sqlx::Error>
    where
        for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    {
        let (permit, idle) = self.acquire().await?;
        // The server may have closed an idle connection. No statement has run yet, so it is safe to try again on a new
        // one.
        if let Some(mut connection) = idle
            && (&mut connection).execute(sqlx::raw_sql(statement)).await.is_ok()
        {
            return Ok(Work { session: self, _permit: permit, connection: Some(connection) });
        }
        let mut connection = self.connector.acquire().await?.detach();
        (&mut connection).execute(sqlx::raw_sql(statement)).await?;
        Ok(Work { session: self, _permit: permit, connection: Some(connection) })
    }

    /// Runs a statement outside of a transaction. It is one message: the server completes it, however long this process
    /// takes to read the result.
    pub(crate) async fn fetch<'q, E>(&self, statement: E) -> Result<Vec<DB::Row>, sqlx::Error>
    where
        E: Execute<'q, DB> + 'q,
        for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    {
        let (_permit, idle) = self.acquire().await?;
        let mut connection = match idle {
            Some(connection) => connection,
            None => self.connector.acquire().await?.detach(),
        };
        let rows = (&mut connection).fetch_all(statement).await?;
        self.keep(connection);
        Ok(rows)
    }
}

/// A transaction on a session. Dropping it without a commit closes its connection, which rolls it back.
pub(crate) struct Work<'s, DB: Database> {
    session: &'s Session<DB>,
    _permit: SemaphorePermit<'s>,
    /// `None` once it has ended.
    connection: Option<DB::Connection>,
}

/// Why a transaction of a session failed. The two cases differ in what is known about its outcome.
#[derive(Debug)]
pub(crate) enum Failed {
    /// A statement before the COMMIT failed: nothing was committed.
    Statement(sqlx::Error),
    /// The COMMIT failed: the transaction may have committed.
    Commit(sqlx::Error),
}

impl From<sqlx::Error> for Failed {
    fn from(error: sqlx::Error) -> Self {
        Self::Statement(error)
    }
}

impl<DB: Database> Work<'_, DB> {
    /// Commits, and keeps the connection for the next statement.
    pub(crate) async fn commit(mut self) -> Result<(), Failed>
    where
        for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    {
        if let Some(mut connection) = self.connection.take() {
            (&mut connection).execute(sqlx::raw_sql("COMMIT")).await.map_err(Failed::Commit)?;
            self.session.keep(connection);
        }
        Ok(())
    }
}

impl<DB: Database> Deref for Work<'_, DB> {
    type Target = DB::Connection;

    fn deref(&self) -> &DB::Connection {
        match &self.connection {
            Some(connection) => connection,
            None => unreachable!("only a commit takes the connection, and it consumes the transaction"),
        }
    }
}

impl<DB: Database> DerefMut for Work<'_, DB> {
    fn deref_mut(&mut self) -> &mut DB::Connection {
        match &mut self.connection {
            Some(connection) => connection,
            None => unreachable!("only a commit takes the connection, and it consumes the transaction"),
        }
    }
}
