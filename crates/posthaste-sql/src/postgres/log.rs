//! The tables of the built-in bus: topics, partitions, offsets and group leases.

mod append;
mod inspect;
mod leases;
mod notify;
#[cfg(test)]
mod plans;
mod quarantine;
mod read;
mod retention;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::bus::{Advance, PublishError, Record};
use posthaste_core::heartbeat::statement_timeout;
use posthaste_core::log::{AppendNotifier, Leases, LogStore, Look, Member, NewRecord, Newest, StoredRecord};
use posthaste_core::{FaultKind, StoreError};
use sqlx::postgres::PgRow;
use sqlx::{Execute, Executor, PgPool, Postgres};
use tokio::time::timeout;

use super::errors::doing;
use crate::log::MAX_READ_BYTES;
use crate::session::{Failed, Session};
use read::Limits;

/// The bus on PostgreSQL.
pub type Log = posthaste_core::log::Log<LogTables>;

/// How long a statement may take before its connection is given up. It is shorter than the default lease, so that
/// another attempt can still renew it.
pub(super) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The number of connections for appends, reads and acks, unless the caller chooses another.
const PIPELINE: u32 = 8;
/// The number of connections for operator queries.
const OPERATORS: u32 = 2;
/// The number of connections besides those for appends, reads and acks: for operator queries, leases and notifications.
pub(super) const BESIDE_PIPELINE: u32 = OPERATORS + 2;

/// Begins a transaction in which records are read by their index, in its order.
///
/// Statistics are late for a partition that grows in a burst. A planner that believes that a million records are ten
/// collects and sorts all of them, in every fetch. So scans and sorts are disabled.
pub(super) const READ: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY;
     SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off;
     SET LOCAL jit = off";

/// Begins a transaction with more than one statement. Each statement sees every commit before it. Records are read by
/// their index. The locks of a host that vanishes are released after ten seconds.
pub(super) const WRITE: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
     SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL jit = off;
     SET LOCAL lock_timeout = '10s'; SET LOCAL idle_in_transaction_session_timeout = '10s'";

/// The longest name of a topic. An index cannot hold a text of any length.
const MAX_TOPIC: usize = 2_000;

/// The tables of the built-in bus on PostgreSQL.
///
/// Many processes may use them. The log opens connections of its own with the options of the pool: a few for appends,
/// reads and acks, two for operator queries, one for leases, so that nothing delays renewals, and one that listens for
/// notifications. A statement that fails or takes too long closes its connection. The pool itself would keep a
/// connection that hangs.
///
/// An append is one statement. It needs the isolation level READ COMMITTED, which is PostgreSQL's default. On a server
/// with another default, appends to one partition at the same time fail and are repeated.
#[derive(Clone)]
pub struct LogTables {
    /// Gives the options of connections. None of its own is used.
    pool: PgPool,
    pipeline: Arc<Session<Postgres>>,
    operators: Arc<Session<Postgres>>,
    leases: Arc<Session<Postgres>>,
    /// The progress rows that were already reported as unreadable. Leases are renewed every few seconds, but each row
    /// is logged only once.
    reported: Arc<Mutex<HashSet<String>>>,
}

impl LogTables {
    /// The tables of a database whose hub tables are up to date, see [`migrate_hub`](super::migrate_hub).
    pub fn new(pool: PgPool) -> Self {
        Self::with_connections(pool, PIPELINE)
    }

    /// The same, with this many connections for appends, reads and acks.
    pub(super) fn with_connections(pool: PgPool, pipeline: u32) -> Self {
        let connections = |count| Arc::new(Session::with_connections(&pool, count));
        let (pipeline, operators, leases) = (connections(pipeline), connections(OPERATORS), connections(1));
        Self { pipeline, operators, leases, pool, reported: Arc::default() }
    }

    /// Runs one statement of an operator, in a transaction that begins with [`READ`] or [`WRITE`].
    async fn operate<'q, E>(
        &self,
        what: &'static str,
        begin: &'static str,
        statement: E,
    ) -> Result<Vec<PgRow>, StoreError>
    where
        E: Execute<'q, Postgres> + 'q,
    {
        in_transaction(&self.operators, what, begin, statement).await
    }

    /// Runs one writing statement of an operator, after another one that locks. It sees every commit before the lock.
    async fn operate_locked<'q, E>(
        &self,
        what: &'static str,
        lock: &'static str,
        statement: E,
    ) -> Result<Vec<PgRow>, StoreError>
    where
        E: Execute<'q, Postgres> + 'q,
    {
        let run = async {
            let mut work = self.operators.begin(WRITE).await?;
            work.execute(sqlx::raw_sql(lock)).await?;
            let rows = work.fetch_all(statement).await?;
            work.commit().await?;
            Ok(rows)
        };
        limited(what, STATEMENT_TIMEOUT, run).await
    }

    /// Runs one statement as a transaction of its own. It is one message: the server completes it, however long this
    /// process takes to read the result. So a process that stops or vanishes leaves no row locked.
    async fn run<'q, E>(&self, what: &'static str, statement: E) -> Result<Vec<PgRow>, StoreError>
    where
        E: Execute<'q, Postgres> + 'q,
    {
        let run = self.pipeline.fetch(statement);
        limited(what, STATEMENT_TIMEOUT, async { run.await.map_err(Failed::Commit) }).await
    }
}

/// Runs one statement in a transaction of its own that begins with `begin`.
pub(super) async fn in_transaction<'q, E>(
    session: &Session<Postgres>,
    what: &'static str,
    begin: &'static str,
    statement: E,
) -> Result<Vec<PgRow>, StoreError>
where
    E: Execute<'q, Postgres> + 'q,
{
    let run = async {
        let mut work = session.begin(begin).await?;
        let rows = work.fetch_all(statement).await?;
        work.commit().await?;
        Ok(rows)
    };
    limited(what, STATEMENT_TIMEOUT, run).await
}

/// Runs the work of one store method, with a limit in time. At the limit its connection is closed, and the work may
/// have taken effect all the same.
pub(super) async fn limited<T>(
    what: &'static str,
    limit: Duration,
    work: impl Future<Output = Result<T, Failed>>,
) -> Result<T, StoreError> {
    match timeout(limit, doing(what, work)).await {
        Ok(result) => result,
        Err(late) => Err(StoreError::new(what, FaultKind::OutcomeUnknown, late)),
    }
}

#[async_trait]
impl LogStore for LogTables {
    /// PostgreSQL cannot store U+0000 in a text. Headers may contain it, because they are stored as JSON.
    fn check(&self, record: &Record) -> Result<(), PublishError> {
        let reason = match record {
            Record { key, .. } if key.contains('\0') => "its key contains the character U+0000".to_owned(),
            Record { topic, .. } if topic.contains('\0') => "its topic contains the character U+0000".to_owned(),
            Record { topic, .. } if topic.len() > MAX_TOPIC => {
                format!("the name of its topic has {} bytes, more than {MAX_TOPIC}", topic.len())
            }
            _ => return Ok(()),
        };
        Err(PublishError::Refused { reason })
    }

    fn notifier(&self) -> Option<&dyn AppendNotifier> {
        Some(self)
    }

    async fn create_topics(&self, names: Vec<String>, partitions: u32) -> Result<Vec<(String, Vec<i64>)>, StoreError> {
        append::create_topics(self, &names, partitions).await
    }

    async fn append(&self, records: Vec<NewRecord>) -> Result<(), StoreError> {
        append::append(self, &records).await
    }

    async fn newest(&self) -> Result<Newest, StoreError> {
        read::newest(self).await
    }

    async fn read(&self, places: &[(i64, i64)], limit: usize) -> Result<(Vec<StoredRecord>, bool), StoreError> {
        let limits = Limits { records: limit, records_per_partition: limit, bytes: MAX_READ_BYTES };
        read::read(&self.pipeline, places, limits).await
    }

    async fn look(&self, member: &Member, lease: Duration) -> Result<Look, StoreError> {
        limited("look for free partitions", statement_limit(lease), leases::look(self, member, lease)).await
    }

    async fn lease(&self, member: &Member, lease: Duration) -> Result<Leases, StoreError> {
        limited("lease partitions", statement_limit(lease), leases::lease(self, member, lease)).await
    }

    async fn record(&self, member: &Member, advances: &[Advance]) -> Result<Vec<i64>, StoreError> {
        leases::record(self, member, advances).await
    }

    async fn release(&self, member: &Member, partitions: &[i64]) -> Result<(), StoreError> {
        leases::release(self, member, partitions).await
    }

    async fn leave(&self, member: &Member) -> Result<(), StoreError> {
        leases::leave(self, member).await
    }
}

/// How long a statement about leases may take. Not less than a busy server may need: a lease that is lost by mistake
/// costs repeated deliveries, too.
fn statement_limit(lease: Duration) -> Duration {
    statement_timeout(lease).clamp(STATEMENT_TIMEOUT / 2, STATEMENT_TIMEOUT)
}
