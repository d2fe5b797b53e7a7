use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use posthaste_core::hub_store::{self, Schema};
use posthaste_core::outbox::TableName;
use posthaste_core::{FaultKind, StoreError};
use sqlx::AssertSqlSafe;
use sqlx::migrate::{MigrateError, Migrator};
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};

use super::errors::store_error;
use super::migrations;
use super::writer::{WriteError, Writer};
use super::writer_lock::{BUSY_TIMEOUT, WriterLock};
use crate::migrations::{bring_up, newest};

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
    writer_lock: WriterLock,
}

/// How many connections read for the pipeline, and how many for people.
const READERS: u32 = 4;
const OPERATORS: u32 = 2;

/// Why a database cannot be used, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    #[error("database URL {url:?} is not one of SQLite: write sqlite://FILE, for example sqlite://posthaste.db")]
    /// It is no URL of SQLite.
    BadUrl {
        /// As it was given.
        url: String,
        #[source]
        /// What is wrong with it.
        source: sqlx::Error,
    },
    #[error("database {path} cannot be opened: check that its folder exists and that this user may write there")]
    /// The file cannot be opened.
    Unreachable {
        /// The file.
        path: PathBuf,
        #[source]
        /// What the database said.
        source: sqlx::Error,
    },
}

impl Database {
    /// Opens the file, making it where it is missing.
    pub async fn open(url: &str) -> Result<Self, OpenError> {
        let options = SqliteConnectOptions::from_str(url);
        Self::open_with(options.map_err(|source| OpenError::BadUrl { url: url.to_owned(), source })?).await
    }

    /// Opens the file of these options, beside the connections of a service.
    pub(super) async fn open_with(options: SqliteConnectOptions) -> Result<Self, OpenError> {
        let options = options
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(BUSY_TIMEOUT)
            .pragma("cache_size", "-16000")
            .pragma("temp_store", "memory")
            // Read ahead, so that a reader is not woken for every few rows; not by more, because rows may be large.
            .row_buffer_size(128)
            // Multi-row statements come in as many shapes as there are row counts up to the chunk size.
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

    /// The schema of the hub tables, without changing it.
    pub async fn schema(&self) -> Result<Schema, StoreError> {
        let migrator = migrations::hub();
        Ok(Schema { found: self.newest_of(&migrator).await?, known: newest(&migrator) })
    }

    /// Brings the hub tables up to date: log, dead letters, registry and channels.
    pub async fn migrate_hub(&self) -> Result<(), hub_store::OpenError> {
        let migrator = migrations::hub();
        let known = newest(&migrator);
        self.writer.migrate(Arc::new(migrator)).await.map_err(|error| match error {
            MigrateError::VersionMissing(found) => hub_store::OpenError::NewerSchema { found, known },
            error => hub_store::OpenError::Migration(error.into()),
        })
    }

    /// Brings a table of the library up to date. A process that finds it up to date writes nothing.
    pub(super) async fn migrate(
        &self,
        table: &TableName,
        migrator: Migrator,
    ) -> Result<(), posthaste_core::outbox::OpenError> {
        let (found, migrator) = (self.newest_of(&migrator).await?, Arc::new(migrator));
        bring_up(&migrator, table, found, self.writer.migrate(migrator.clone())).await
    }

    /// The newest migration that was made.
    async fn newest_of(&self, migrator: &Migrator) -> Result<Option<i64>, StoreError> {
        let history = &*migrator.table_name;
        let read = async {
            let there = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE name = ?)");
            match there.bind(history).fetch_one(&self.readers).await? {
                true => {
                    let newest = AssertSqlSafe(format!("SELECT max(version) FROM {history}"));
                    sqlx::query_scalar(newest).fetch_one(&self.readers).await
                }
                false => Ok(None),
            }
        };
        read.await.map_err(|error| store_error("read the version of the schema", error))
    }

    /// The lock that a task of this process holds while it writes to the file.
    pub(super) fn writer_lock(&self) -> &WriterLock {
        &self.writer_lock
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

    /// Fails if nothing could be written now: because the writer does not answer, or the file stays locked.
    pub async fn check(&self) -> Result<(), StoreError> {
        self.write("reach the database", |_| Box::pin(async { Ok(()) })).await
    }

    /// Writes this many bytes, commits them and leaves nothing behind: fails where the disk is full or the file is
    /// read-only. The hub's tables must be up to date.
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

    /// Runs `job` in a transaction that other jobs share, and answers after its commit.
    ///
    /// A group in which one job fails is rolled back and repeated job by job, so `job` may run more than once and must
    /// have no effect but on the connection. An error of kind [`FaultKind::OutcomeUnknown`] means that it may have committed.
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

    /// The same for a job with arguments, which several runs of it share.
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
        // The writer last: only a connection that may write can fold the log into the file.
        self.readers.close().await;
        self.operators.close().await;
        self.writer.close().await;
    }
}

/// The file behind a URL, for messages and for what lies beside it.
pub fn file_of(url: &str) -> Option<PathBuf> {
    let options = SqliteConnectOptions::from_str(url).ok()?;
    Some(Path::new(options.get_filename()).to_owned())
}
