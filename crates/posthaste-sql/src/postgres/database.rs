use std::sync::Arc;
use std::time::Duration;

use posthaste_core::StoreError;
use posthaste_core::hub_store::OpenError;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgRow};
use sqlx::{Connection, Execute, PgConnection, PgPool, Postgres};
use tokio::time::timeout;

use super::log::{self, READ, STATEMENT_TIMEOUT, WRITE, in_transaction, limited};
use super::{outbox, schemas};
use crate::session::{Failed, Session};

/// The number of connections of the pool: for the start, and for operator queries on the outbox.
const POOL: u32 = 2;
/// The number of connections for operator queries on dead letters and registrations.
const OPERATORS: u32 = 2;
/// The number of connections for the renewals of dead letters.
const RENEWALS: u32 = 1;
/// The number of connections for the audit log, for which nothing else may wait.
const AUDIT: u32 = 1;
/// The connections that a hub has besides those of its two pipelines: of the log, and for ingest and dead letters.
const BESIDE_PIPELINES: u32 =
    POOL + OPERATORS + RENEWALS + AUDIT + outbox::CONNECTIONS as u32 + log::BESIDE_PIPELINE + schemas::CONNECTIONS;

/// The fewest connections that a hub can have.
pub const MIN_CONNECTIONS: u32 = BESIDE_PIPELINES + 2;

/// How long a new connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The connections of a hub to its database. Many processes may use the database at once.
///
/// Each kind of work has connections of its own, so that none can exhaust those of another: renewals have one, the
/// audit log has one, operator queries have two. A statement that fails or takes too long closes its connection. Clones
/// share the connections.
#[derive(Clone)]
pub struct Database {
    /// Gives the options of connections.
    pool: PgPool,
    /// For ingest, and for claims and settlements of dead letters.
    pipeline: Arc<Session<Postgres>>,
    operators: Arc<Session<Postgres>>,
    renewals: Arc<Session<Postgres>>,
    audit: Arc<Session<Postgres>>,
    /// The number of connections for appends to the log, its reads and acks.
    log_connections: u32,
}

impl Database {
    /// Connects with these options. It opens at most `max_connections` connections, and at least [`MIN_CONNECTIONS`].
    pub async fn connect(options: PgConnectOptions, max_connections: u32) -> Result<Self, sqlx::Error> {
        let options = options.application_name("posthaste");
        // A pool would repeat the attempt until its timeout, and not say why it fails.
        let connect = timeout(CONNECT_TIMEOUT, PgConnection::connect_with(&options)).await;
        connect.unwrap_or(Err(sqlx::Error::PoolTimedOut))?.close().await?;
        let pool = PgPoolOptions::new().max_connections(POOL).acquire_timeout(CONNECT_TIMEOUT);
        let pool = pool.connect_lazy_with(options);
        let pipelines = max_connections.max(MIN_CONNECTIONS) - BESIDE_PIPELINES;
        let connections = |count| Arc::new(Session::with_connections(&pool, count));
        let (pipeline, operators) = (connections(pipelines - pipelines / 2), connections(OPERATORS));
        let (renewals, audit) = (connections(RENEWALS), connections(AUDIT));
        Ok(Self { renewals, audit, pipeline, operators, log_connections: pipelines / 2, pool })
    }

    /// A small pool, for the outbox and for the start.
    pub fn pool(&self) -> &PgPool {
        &self.pool
    }

    pub(super) fn log_connections(&self) -> u32 {
        self.log_connections
    }

    pub(super) fn pipeline(&self) -> &Session<Postgres> {
        &self.pipeline
    }

    pub(super) fn renewals(&self) -> &Session<Postgres> {
        &self.renewals
    }

    pub(super) fn audit(&self) -> &Session<Postgres> {
        &self.audit
    }

    pub(super) fn operators(&self) -> &Session<Postgres> {
        &self.operators
    }

    /// Reads for an operator, by an index.
    pub(super) async fn read<'q, E>(&self, what: &'static str, statement: E) -> Result<Vec<PgRow>, StoreError>
    where
        E: Execute<'q, Postgres> + 'q,
    {
        in_transaction(&self.operators, what, READ, statement).await
    }

    /// Runs one statement of the pipeline that changes rows.
    pub(super) async fn write<'q, E>(&self, what: &'static str, statement: E) -> Result<Vec<PgRow>, StoreError>
    where
        E: Execute<'q, Postgres> + 'q,
    {
        in_transaction(&self.pipeline, what, WRITE, statement).await
    }

    /// Writes this many bytes, commits them and deletes them: fails if the disk is full or the server is read-only. The
    /// hub tables must be up to date.
    pub async fn check_write(&self, bytes: usize) -> Result<(), StoreError> {
        const FILL: &str = "INSERT INTO write_probe (filler) VALUES ($1)";
        const CLEAR: &str = "DELETE FROM write_probe";
        let probe = async {
            let mut work = self.operators.begin(WRITE).await?;
            sqlx::query(FILL).bind(vec![0u8; bytes]).execute(&mut *work).await.map_err(Failed::Statement)?;
            sqlx::query(CLEAR).execute(&mut *work).await.map_err(Failed::Statement)?;
            work.commit().await
        };
        limited("write to the database", STATEMENT_TIMEOUT, probe).await
    }

    /// Closes the connections of the pool. The others are closed when the last clone is dropped.
    pub async fn close(&self) {
        self.pool.close().await;
    }
}

/// Describes why the server cannot be used. It never contains the URL, which may have a password.
pub(super) fn unreachable(name: &str, source: sqlx::Error) -> OpenError {
    let code = source.as_database_error().and_then(|error| error.code()).unwrap_or_default();
    let remedy = match &*code {
        "3D000" => "create it with CREATE DATABASE … ENCODING 'UTF8', or correct database.url",
        "28000" | "28P01" => "correct the user and the password in database.url",
        _ => "check that the server runs and that database.url is right",
    };
    OpenError::Unreachable { problem: format!("database {name} cannot be used: {remedy}"), source: source.into() }
}
