use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use chrono::DateTime;
use futures_util::future::BoxFuture;
use posthaste_core::outbox::TableName;
use posthaste_core::{FaultKind, StoreError};
use sqlx::AssertSqlSafe;
use sqlx::migrate::Migrator;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};

use super::errors::{doing, store_error};
use super::hub_migrations::Direction;
use super::wal::WAL_LIMIT;
use super::writer::{WriteError, Writer};
use super::writer_lock::{BUSY_TIMEOUT, WriterLock};
use crate::migrations::{Applied, bring_up};

/// One SQLite file: a few connections that read for the pipeline, two for operator queries, and one for all writes.
///
/// SQLite allows one writer at a time. So all writes go through one queue, and jobs that wait for the writer are
/// committed together. While one group is synced to the disk, the next group gathers.
#[derive(Clone)]
pub struct Database {
    readers: SqlitePool,
    operators: SqlitePool,
    writer: Writer,
    writer_lock: WriterLock,
}

/// The number of connections that read for the pipeline, and for operator queries.
const READERS: u32 = 4;
const OPERATORS: u32 = 2;

/// Why a database cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    #[error("database URL {url:?} is not a SQLite URL: write sqlite://FILE, for example sqlite://posthaste.db")]
    /// The URL is not a SQLite URL.
    BadUrl {
        /// The URL.
        url: String,
        #[source]
        /// The error of the driver.
        source: sqlx::Error,
    },
    #[error("database {path} cannot be opened: check that its folder exists and that this user may write there")]
    /// The file cannot be opened.
    Unreachable {
        /// The file.
        path: PathBuf,
        #[source]
        /// The error of the database.
        source: sqlx::Error,
    },
}

impl Database {
    /// Opens the file, and creates it if it is missing.
    pub async fn open(url: &str) -> Result<Self, OpenError> {
        let options = SqliteConnectOptions::from_str(url);
        Self::open_with(options.map_err(|source| OpenError::BadUrl { url: url.to_owned(), source })?).await
    }

    /// Opens the file of these options, in addition to the connections of a service.
    pub(crate) async fn open_with(options: SqliteConnectOptions) -> Result<Self, OpenError> {
        let options = options
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(BUSY_TIMEOUT)
            // When SQLite begins the WAL anew, it cuts the file to this size.
            .pragma("journal_size_limit", WAL_LIMIT.to_string())
            .pragma("cache_size", "-16000")
            .pragma("temp_store", "memory")
            // Reads ahead, so that a reader is not woken for every few rows. The number is small, because rows may be
            // large.
            .row_buffer_size(128)
            // Room for the multi-row statements: there is one for each row count up to the chunk size.
            .statement_cache_capacity(600);
        let path = options.get_filename().to_owned();
        let unreachable = |source| OpenError::Unreachable { path: path.clone(), source };
        let (writer, writer_lock) = Writer::start(&options).await.map_err(unreachable)?;
        let options = options.read_only(true);
        let pool = |size| SqlitePoolOptions::new().max_connections(size).test_before_acquire(false);
        let readers = pool(READERS).connect_with(options.clone()).await.map_err(unreachable)?;
        let operators = pool(OPERATORS).connect_with(options).await.map_err(unreachable)?;
        Ok(Self { readers, operators, writer, writer_lock })
    }

    /// Brings a table of the library up to date. A process that finds it up to date writes nothing.
    pub(super) async fn migrate(
        &self,
        table: &TableName,
        migrator: Migrator,
    ) -> Result<(), posthaste_core::outbox::OpenError> {
        let (applied, migrator) = (self.applied(&migrator).await?, Arc::new(migrator));
        bring_up(&migrator, table, &applied, self.writer.migrate(migrator.clone(), Direction::Table)).await
    }

    /// The history of these migrations; empty if none was applied.
    pub(super) async fn applied(&self, migrator: &Migrator) -> Result<Vec<Applied>, StoreError> {
        let history = &*migrator.table_name;
        let read = async {
            if !self.exists(history).await? {
                return Ok(Vec::new());
            }
            let rows = AssertSqlSafe(format!(
                "SELECT version, description, unixepoch(installed_on) FROM {history} ORDER BY version"
            ));
            let rows: Vec<(i64, String, Option<i64>)> = sqlx::query_as(rows).fetch_all(&self.readers).await?;
            let row = |(number, description, at): (_, _, Option<i64>)| Applied {
                number,
                description,
                at: at.and_then(|at| DateTime::from_timestamp(at, 0)),
            };
            Ok(rows.into_iter().map(row).collect())
        };
        doing("read the migration history", read).await
    }

    pub(super) async fn exists(&self, table: &str) -> Result<bool, sqlx::Error> {
        let exists = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = ?)");
        exists.bind(table).fetch_one(&self.readers).await
    }

    pub(super) fn writer(&self) -> &Writer {
        &self.writer
    }

    /// The lock that a task of this process holds while it writes to the file.
    pub(super) fn writer_lock(&self) -> &WriterLock {
        &self.writer_lock
    }

    /// Read-only connections for the pipeline. They see the last commit.
    pub fn readers(&self) -> &SqlitePool {
        &self.readers
    }

    /// Read-only connections for operator queries, which never use a connection of the claims.
    pub fn operators(&self) -> &SqlitePool {
        &self.operators
    }

    /// Fails if the database cannot be written to now, because the writer does not run or the file stays locked.
    pub async fn check(&self) -> Result<(), StoreError> {
        self.write("reach the database", |_| Box::pin(async { Ok(()) })).await
    }

    /// Writes this many bytes, commits them and deletes them: fails if the disk is full or the file is read-only. The
    /// hub tables must be up to date.
    pub async fn check_write(&self, bytes: usize) -> Result<(), StoreError> {
        const FILL: &str = "INSERT INTO write_probe (filler) VALUES (zeroblob(?))";
        const CLEAR: &str = "DELETE FROM write_probe";
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let probe = self.write("write to the database", move |connection| {
            Box::pin(async move {
                sqlx::query(FILL).bind(bytes).execute(&mut *connection).await?;
                sqlx::query(CLEAR).execute(connection).await.map(|_| ())
            })
        });
        probe.await
    }

    /// The same database, whose writes may wait while others run.
    pub(super) fn in_background(&self) -> Self {
        Self { writer: self.writer.in_background(), ..self.clone() }
    }

    /// Runs `job` in a transaction that other jobs share, and returns after its commit.
    ///
    /// A group in which one job fails is rolled back and repeated job by job, so `job` may run more than once and must
    /// only change the database. An error of kind [`FaultKind::OutcomeUnknown`] means that it may have committed.
    pub async fn write<T, F>(&self, doing: &'static str, job: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut SqliteConnection) -> BoxFuture<'c, Result<T, sqlx::Error>> + Send + Sync + 'static,
    {
        self.writer.write(job).await.map_err(|error| match error {
            WriteError::Undone(error) => store_error(doing, error),
            WriteError::Unknown(error) => StoreError::new(doing, FaultKind::OutcomeUnknown, error),
        })
    }

    /// Like [`write`](Self::write), for a job with arguments, which repeated runs of the job share.
    pub(super) async fn write_with<A, T, F>(&self, doing: &'static str, arguments: A, job: F) -> Result<T, StoreError>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
        F: for<'c> Fn(&'c mut SqliteConnection, Arc<A>) -> BoxFuture<'c, Result<T, sqlx::Error>>
            + Send
            + Sync
            + 'static,
    {
        let arguments = Arc::new(arguments);
        self.write(doing, move |connection| job(connection, arguments.clone())).await
    }

    /// Waits for queued writes, then closes the file.
    pub async fn close(&self) {
        // The writer is closed last: only a connection that may write can checkpoint the WAL.
        self.readers.close().await;
        self.operators.close().await;
        self.writer.close().await;
    }
}

/// The file of a URL, for messages and for the names of the files beside it.
pub fn file_of(url: &str) -> Option<PathBuf> {
    let options = SqliteConnectOptions::from_str(url).ok()?;
    Some(Path::new(options.get_filename()).to_owned())
}
