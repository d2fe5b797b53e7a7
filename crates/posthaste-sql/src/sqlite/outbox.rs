use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::outbox::{
    RowUpdate, SettledRows, DeadFilter, DeadHead, InTransaction, LeaseSet, Mode, Notes, OpenError, OutboxRow, Owner, Pool,
    Purge, Reader, Registration, Store, TableName, ClaimedRows, OperatorStore, ClaimRequest,
};
use posthaste_core::{Event, FaultKind, StoreError, Wakeup};
use serde::Serialize;
use sqlx::sqlite::SqlitePool;
use sqlx::{AssertSqlSafe, Sqlite, SqliteConnection};

use super::clock::{NOW_MS, NOW_TEXT};
use super::database::{self, Database};
use super::errors::{commit_error, store_error};
use super::migrations;
use crate::outbox::Sweeper;

mod claim;
mod insert;
mod lease;
mod undecodable;
mod ownership;
#[cfg(test)]
mod plans;
mod rows;
mod settle;
mod transaction;
mod operator;

pub use insert::Ingested;
pub use transaction::Transaction;

/// An outbox table on SQLite. It lies in the service's own file.
///
/// What it reads and writes for itself goes through connections of its own: a few that read, and one that writes for
/// everybody and groups what waits together into one commit. So the service's pool is neither starved nor starving.
#[derive(Clone)]
pub struct OutboxStore(Arc<Shared>);

struct Shared {
    database: Database,
    /// What the service's transactions run on.
    service: Option<SqlitePool>,
    table: TableName,
    mode: Mode,
    sweeper: Sweeper,
    /// Single node: in whose name this process last owned the table.
    owner: Mutex<Option<String>>,
}

/// The file's journal mode becomes WAL, for good and for everybody who uses it: without, who reads would keep others from
/// writing. A database in memory cannot hold an outbox, because each connection would have one of its own.
#[async_trait]
impl Pool<OutboxStore> for SqlitePool {
    async fn open(&self, table: TableName, mode: Mode) -> Result<OutboxStore, OpenError> {
        let database = beside(self).await?;
        OutboxStore::open(database, Some(self.clone()), table, mode).await
    }
}

/// For who has no pool: the service's transactions are not to be had then.
#[async_trait]
impl Pool<OutboxStore> for Database {
    async fn open(&self, table: TableName, mode: Mode) -> Result<OutboxStore, OpenError> {
        self.outbox(table, mode).await
    }
}

/// A database on the file of this pool.
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
    /// Brings the outbox table up to date and opens it. The service's transactions are not to be had here: for those, open
    /// it from the service's own pool.
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
        database.migrate(&table, migrations::outbox(&table)).await?;
        if matches!(mode, Mode::Ordered(_)) {
            database.migrate(&table, migrations::ordered(&table)).await?;
        }
        let (sweeper, owner) = (Sweeper::new(), Mutex::default());
        Ok(Self(Arc::new(Shared { database, service, table, mode, sweeper, owner })))
    }

    /// Fills in the table's name, as the migrations do, and the database's clock, and what is unfinished.
    fn sql(&self, template: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(fill(template, &self.0.table, self.0.mode))
    }

    fn is_ordered(&self) -> bool {
        matches!(self.0.mode, Mode::Ordered(_))
    }
}

/// `status <> 1` is said in both cases: it is what the index of unfinished rows asks for.
pub(super) fn fill(template: &str, table: &TableName, mode: Mode) -> String {
    let unfinished = match mode {
        Mode::Ordered(DeadHead::Skip) => "status <> 1 AND status IN (0, 2)",
        _ => "status <> 1",
    };
    let template = migrations::fill(template, table).replace("{unfinished}", unfinished);
    template.replace("{now_ms}", NOW_MS).replace("{now}", NOW_TEXT)
}

/// Many values as one bind.
fn json(values: &(impl Serialize + ?Sized)) -> Result<String, sqlx::Error> {
    serde_json::to_string(values).map_err(|error| sqlx::Error::Encode(error.into()))
}

#[async_trait]
impl Store for OutboxStore {
    type Connection = SqliteConnection;
    type Transaction = Transaction;

    fn table(&self) -> &TableName {
        &self.0.table
    }

    fn mode(&self) -> Mode {
        self.0.mode
    }

    async fn register(&self, reader: Reader, lease: Duration) -> Result<Registration, StoreError> {
        self.register_reader(reader, lease).await
    }

    async fn acquire_ownership(&self, owner: &str, lease: Duration) -> Result<Owner, StoreError> {
        self.take_ownership(owner, lease).await
    }

    async fn release_ownership(&self, owner: &str) -> Result<(), StoreError> {
        self.end_ownership(owner).await
    }

    async fn begin(&self) -> Result<Transaction, StoreError> {
        const DOING: &str = "begin a transaction";
        let Some(service) = &self.0.service else {
            let remedy = "this outbox has no pool of a service: open it from one";
            return Err(StoreError::new(DOING, FaultKind::Permanent, remedy));
        };
        Transaction::begin(service, self.0.database.turn()).await.map_err(|error| store_error(DOING, error))
    }

    async fn commit(&self, transaction: Transaction) -> Result<(), StoreError> {
        transaction.commit().await.map_err(|error| commit_error("commit a transaction", error))
    }

    async fn rollback(&self, transaction: Transaction) -> Result<(), StoreError> {
        transaction.rollback().await.map_err(|error| store_error("roll back a transaction", error))
    }

    async fn insert(
        &self,
        connection: &mut SqliteConnection,
        events: &[&Event],
        claim_id: Option<&str>,
    ) -> Result<Vec<i64>, StoreError> {
        self.insert_all(connection, events, claim_id).await.map_err(|error| store_error("write to the outbox", error))
    }

    /// SQLite refuses the COMMIT of what it has rolled back itself, and says so.
    async fn surviving(&self, _: &mut SqliteConnection, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        Ok(rows.iter().copied().collect())
    }

    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, StoreError> {
        match self.0.mode.leases_rows() {
            true => self.lease_due(request).await,
            false => self.read_due(request).await.map_err(|error| store_error("claim from the outbox", error)),
        }
    }

    async fn next_due(&self, request: &ClaimRequest<'_>) -> Result<Option<Duration>, StoreError> {
        self.first_due(request).await.map_err(|error| store_error("claim from the outbox", error))
    }

    async fn mark_started(&self, claim_id: &str, started: &str, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        const DOING: &str = "claim from the outbox";
        let failed = |error| store_error(DOING, error);
        let binds = vec![json(&[claim_id]).map_err(failed)?, json(rows).map_err(failed)?, started.to_owned()];
        self.change_leases(DOING, lease::MARK_STARTED.to_owned(), binds).await
    }

    async fn settle(&self, fencing_tokens: &[String], changes: &[RowUpdate]) -> Result<SettledRows, StoreError> {
        self.change(fencing_tokens, changes).await
    }

    async fn renew(&self, claim_ids: &[String], rows: &[i64]) -> Result<SettledRows, StoreError> {
        const DOING: &str = "renew leases";
        let failed = |error| store_error(DOING, error);
        let binds = vec![json(claim_ids).map_err(failed)?, json(rows).map_err(failed)?];
        let rows = self.change_leases(DOING, lease::RENEW.to_owned(), binds).await?;
        Ok(SettledRows { rows, locked: HashSet::new() })
    }

    async fn release(&self, leases: &LeaseSet<'_>) -> Result<HashSet<i64>, StoreError> {
        self.release_leases(leases).await
    }

    fn runs_on_own_thread(&self) -> bool {
        true
    }

    /// Rows whose type is no text in UTF-8 go dead on the way: no channel could ever claim them.
    async fn pending_types(&self) -> Result<Vec<String>, StoreError> {
        let failed = |error| store_error("list the pending event types of the outbox", error);
        let (types, nameless) = self.due_types().await.map_err(failed)?;
        if !nameless.is_empty() {
            self.mark_undecodable_dead(nameless).await;
        }
        Ok(types)
    }

    /// SQLite has no way to tell.
    fn tells_others(&self) -> bool {
        false
    }

    async fn notify(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn listen(&self, _: Wakeup) -> Result<(), StoreError> {
        std::future::pending().await
    }
}

#[async_trait]
impl OperatorStore for OutboxStore {
    async fn find(&self, event_id: &str) -> Result<Option<OutboxRow>, StoreError> {
        self.find_row(event_id).await.map_err(|error| store_error("find an event in the outbox", error))
    }

    async fn dead(&self, filter: &DeadFilter, limit: usize) -> Result<Vec<OutboxRow>, StoreError> {
        self.list_dead(filter, limit).await.map_err(|error| store_error("list the dead events of the outbox", error))
    }

    async fn count_dead(&self, filter: &DeadFilter) -> Result<u64, StoreError> {
        self.count_dead_rows(filter).await.map_err(|error| store_error("count the dead events of the outbox", error))
    }

    async fn replay(&self, filter: &DeadFilter, after: i64, limit: usize) -> Result<(u64, i64), StoreError> {
        self.replay_dead(filter, after, limit).await
    }

    async fn discard(&self, event_id: &str) -> Result<bool, StoreError> {
        self.discard_dead(event_id).await
    }

    async fn purge(&self, purge: Purge, older_than: Duration, limit: usize) -> Result<u64, StoreError> {
        self.purge_rows(purge, older_than, limit).await
    }

    async fn oldest_due(&self) -> Result<Option<Duration>, StoreError> {
        self.age_of_oldest_due().await.map_err(|error| store_error("look at the head of the outbox", error))
    }
}

/// A transaction of sqlx waits for the file's lock as SQLite does, at its first write or, better, at its beginning:
/// `pool.begin_with("BEGIN IMMEDIATE")`. One that has read before it writes may have to begin anew.
impl InTransaction<OutboxStore> for sqlx::Transaction<'_, Sqlite> {
    fn parts(&mut self) -> (&mut SqliteConnection, Option<&mut Notes<OutboxStore>>) {
        (self, None)
    }
}
