use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use posthaste_core::outbox::{DeadHead, Mode, Notifier, OpenError, Pool, Store, TableName};
use posthaste_core::{FaultKind, StoreError};
use sqlx::AssertSqlSafe;
use sqlx::sqlite::SqlitePool;

use super::clock::{NOW_MS, NOW_TEXT};
use super::database::{self, Database};
use super::errors::store_error;
use super::migrations::{self, DIALECT};
use crate::migrations::check_current;

mod claim;
mod ingest;
mod lease;
mod operator;
mod ownership;
#[cfg(test)]
mod plans;
mod rows;
mod settle;
mod transaction;
mod undecodable;
mod write;

pub use transaction::Transaction;

/// An outbox table on SQLite, in the service's own file.
///
/// It has connections of its own: a few that read, and one writer that groups waiting statements into one commit. So
/// the outbox uses up no connections of the service's pool, and the service cannot exhaust those of the outbox.
#[derive(Clone)]
pub struct OutboxStore(Arc<Shared>);

struct Shared {
    database: Database,
    /// The pool on which the service's transactions run.
    service: Option<SqlitePool>,
    table: TableName,
    mode: Mode,
    /// Single node: the name under which this process last owned the table.
    owner: Mutex<Option<String>>,
}

/// Opening sets the journal mode of the file to WAL, permanently and for every program that uses it: without WAL,
/// readers would block writers. A database in memory cannot hold an outbox, because each connection would have a
/// database of its own.
#[async_trait]
impl Pool<OutboxStore> for SqlitePool {
    async fn open(&self, table: TableName, mode: Mode) -> Result<OutboxStore, OpenError> {
        let database = beside(self).await?;
        OutboxStore::open(database, Some(self.clone()), table, mode).await
    }

    async fn open_existing(&self, table: TableName, mode: Mode) -> Result<OutboxStore, OpenError> {
        let database = beside(self).await?;
        OutboxStore::open_existing(database, Some(self.clone()), table, mode).await
    }
}

/// For a process without a pool of a service. Its store cannot begin the service's transactions.
#[async_trait]
impl Pool<OutboxStore> for Database {
    async fn open(&self, table: TableName, mode: Mode) -> Result<OutboxStore, OpenError> {
        self.outbox(table, mode).await
    }

    async fn open_existing(&self, table: TableName, mode: Mode) -> Result<OutboxStore, OpenError> {
        OutboxStore::open_existing(self.clone(), None, table, mode).await
    }
}

/// Opens the file of this pool as a [`Database`].
pub(super) async fn beside(pool: &SqlitePool) -> Result<Database, OpenError> {
    let file = sqlx::query_scalar("SELECT file FROM pragma_database_list WHERE name = 'main'").fetch_one(pool);
    let file: Option<String> = file.await.map_err(|error| store_error("open the database", error))?;
    if file.is_none_or(|file| file.is_empty()) {
        return Err(OpenError::Unsuitable {
            problem: "database is in memory".to_owned(),
            remedy: "give it a file; for tests without one, posthaste-testing has a store in memory".to_owned(),
        });
    }
    let options = pool.connect_options().as_ref().clone();
    Database::open_with(options.read_only(false).shared_cache(false)).await.map_err(|error| match error {
        database::OpenError::Unreachable { source, .. } => store_error("open the database", source).into(),
        error => StoreError::new("open the database", FaultKind::Permanent, error).into(),
    })
}

impl Database {
    /// Brings the outbox table up to date and opens it. This store cannot begin the service's transactions: for those,
    /// open it from the service's own pool.
    pub async fn outbox(&self, table: TableName, mode: Mode) -> Result<OutboxStore, OpenError> {
        OutboxStore::open(self.clone(), None, table, mode).await
    }
}

impl OutboxStore {
    async fn open(
        database: Database,
        service: Option<SqlitePool>,
        table: TableName,
        mode: Mode,
    ) -> Result<Self, OpenError> {
        for migrator in DIALECT.of_outbox(&table, mode) {
            database.migrate(&table, migrator).await?;
        }
        Ok(Self(Arc::new(Shared { database, service, table, mode, owner: Mutex::default() })))
    }

    /// Opens a table that is up to date.
    async fn open_existing(
        database: Database,
        service: Option<SqlitePool>,
        table: TableName,
        mode: Mode,
    ) -> Result<Self, OpenError> {
        for migrator in DIALECT.of_outbox(&table, mode) {
            check_current(&migrator, &table, &database.applied(&migrator).await?)?;
        }
        Ok(Self(Arc::new(Shared { database, service, table, mode, owner: Mutex::default() })))
    }

    /// Fills in the name of the table, the database's clock, and which rows are unfinished.
    fn sql(&self, template: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(fill(template, &self.0.table, self.0.mode))
    }

    fn is_ordered(&self) -> bool {
        matches!(self.0.mode, Mode::Ordered(_))
    }
}

/// Both conditions contain `status <> 1`, because it is the condition of the index of unfinished rows. SQLite uses that
/// index only for a query that contains its condition.
pub(super) fn fill(template: &str, table: &TableName, mode: Mode) -> String {
    let unfinished = match mode {
        Mode::Ordered(DeadHead::Skip) => "status <> 1 AND status IN (0, 2)",
        _ => "status <> 1",
    };
    let template = migrations::fill(template, table).replace("{unfinished}", unfinished);
    template.replace("{now_ms}", NOW_MS).replace("{now}", NOW_TEXT)
}

impl Store for OutboxStore {
    fn table(&self) -> &TableName {
        &self.0.table
    }

    fn mode(&self) -> Mode {
        self.0.mode
    }

    /// SQLite cannot notify other processes.
    fn notifier(&self) -> Option<&dyn Notifier> {
        None
    }

    fn runs_on_own_thread(&self) -> bool {
        true
    }
}
