use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use futures_util::future::BoxFuture;
use posthaste_core::{FaultKind, StoreError};
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};

use super::migrations;
use super::writer::Writer;
use crate::TableName;
use crate::migrations::newest;

/// One SQLite file: a few connections that read for the pipeline, two for what people ask, and one that writes for
/// everybody.
///
/// SQLite has one writer at a time anyway; giving it a queue turns waiting for the lock into batching, and every
/// commit that is being synced into time in which the next group gathers.
#[derive(Clone)]
pub struct Database {
    readers: SqlitePool,
    operators: SqlitePool,
    writer: Writer,
}

/// How many connections read for the pipeline, and how many for people.
const READERS: u32 = 4;
const OPERATORS: u32 = 2;

/// Why a database cannot be used, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    #[error("database URL {url:?} is not one of SQLite: write sqlite://FILE, for example sqlite://posthaste.db")]
    BadUrl {
        url: String,
        #[source]
        source: sqlx::Error,
    },
    #[error("database {path} cannot be opened: check that its folder exists and that this user may write there")]
    Unreachable {
        path: PathBuf,
        #[source]
        source: sqlx::Error,
    },
    #[error(
        "database schema {found} is newer than this program, which knows {known}: use a newer posthaste, or another database"
    )]
    NewerSchema { found: i64, known: i64 },
    #[error("database schema cannot be brought up to date")]
    Migration(#[source] sqlx::migrate::MigrateError),
}

/// Where the schema of a database stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schema {
    /// The newest migration that was made; `None` in a database without any of ours.
    pub found: Option<i64>,
    /// The newest migration that this program knows.
    pub known: i64,
}

impl Database {
    /// Opens the file, making it where it is missing.
    pub async fn open(url: &str) -> Result<Self, OpenError> {
        let options = SqliteConnectOptions::from_str(url)
            .map_err(|source| OpenError::BadUrl { url: url.to_owned(), source })?
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(Duration::from_secs(5))
            .pragma("cache_size", "-16000")
            .pragma("temp_store", "memory")
            // Multi-row statements come in as many shapes as there are row counts up to the chunk size.
            .statement_cache_capacity(600);
        let path = options.get_filename().to_owned();
        let unreachable = |source| OpenError::Unreachable { path: path.clone(), source };
        let writer = Writer::start(&options).await.map_err(unreachable)?;
        let options = options.read_only(true);
        let pool = |size| SqlitePoolOptions::new().max_connections(size).test_before_acquire(false);
        let readers = pool(READERS).connect_with(options.clone()).await.map_err(unreachable)?;
        let operators = pool(OPERATORS).connect_with(options).await.map_err(unreachable)?;
        Ok(Self { readers, operators, writer })
    }

    /// Where the schema of the hub stands, without changing it.
    pub async fn schema(&self) -> Result<Schema, StoreError> {
        let read = async {
            let there =
                sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE name = 'posthaste_migration')");
            match there.fetch_one(&self.readers).await? {
                true => {
                    sqlx::query_scalar("SELECT max(version) FROM posthaste_migration").fetch_one(&self.readers).await
                }
                false => Ok(None),
            }
        };
        let found = read.await.map_err(|error| store_error("read the version of the schema", error))?;
        Ok(Schema { found, known: newest(&migrations::hub()) })
    }

    /// Brings the outbox table of this name up to date.
    pub async fn migrate_outbox(&self, table: &TableName) -> Result<(), OpenError> {
        self.migrate(migrations::outbox(table)).await
    }

    /// Brings everything else up to date: log, dead letters, registry.
    pub async fn migrate_hub(&self) -> Result<(), OpenError> {
        self.migrate(migrations::hub()).await
    }

    async fn migrate(&self, migrator: sqlx::migrate::Migrator) -> Result<(), OpenError> {
        let known = newest(&migrator);
        self.writer.migrate(migrator).await.map_err(|error| match error {
            sqlx::migrate::MigrateError::VersionMissing(found) => OpenError::NewerSchema { found, known },
            error => OpenError::Migration(error),
        })
    }

    /// Connections that see the last commit and cannot write, for what keeps events moving.
    pub fn readers(&self) -> &SqlitePool {
        &self.readers
    }

    /// As [`readers`](Self::readers), for what people ask: their slow questions wait for each other and never keep a
    /// claim from a connection.
    pub fn operators(&self) -> &SqlitePool {
        &self.operators
    }

    /// Whether something could be written now: the writer answers, and the file's lock can be had.
    pub async fn check(&self) -> Result<(), StoreError> {
        self.write("reach the database", |_| Box::pin(async { Ok(()) })).await
    }

    /// Runs `job` in a transaction that other jobs share, and answers after its commit.
    ///
    /// A group in which one job fails is rolled back and repeated job by job, so `job` may run more than once and must
    /// have no effect but on the connection.
    pub async fn write<T, F>(&self, doing: &'static str, job: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut SqliteConnection) -> BoxFuture<'c, Result<T, sqlx::Error>> + Send + Sync + 'static,
    {
        self.writer.write(job).await.map_err(|error| store_error(doing, error))
    }

    /// Waits for queued writes, then closes the file.
    pub async fn close(&self) {
        // The writer last: only a connection that may write can fold the log into the file.
        self.readers.close().await;
        self.operators.close().await;
        self.writer.close().await;
    }
}

/// What a failed statement means for whoever asked for it.
pub(super) fn store_error(doing: &'static str, error: sqlx::Error) -> StoreError {
    let kind = match &error {
        // A broken constraint breaks again; a locked or full database may recover.
        sqlx::Error::Database(error) if error.kind() != sqlx::error::ErrorKind::Other => FaultKind::Lasting,
        sqlx::Error::Database(_) | sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed => {
            FaultKind::Passing
        }
        _ => FaultKind::Lasting,
    };
    StoreError::new(doing, kind, error)
}

/// The file behind a URL, for messages and for what lies beside it.
pub fn file_of(url: &str) -> Option<PathBuf> {
    let options = SqliteConnectOptions::from_str(url).ok()?;
    Some(Path::new(options.get_filename()).to_owned())
}
