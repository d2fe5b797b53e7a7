use std::sync::Arc;

use async_trait::async_trait;
use posthaste_core::outbox::{DeadHead, Mode, Notifier, OpenError, Pool, Store, TableName};
use sqlx::migrate::Migrator;
use sqlx::{AssertSqlSafe, PgPool, Postgres};

use super::clock::NOW;
use super::migrations::{self, DIALECT, applied, check_encoding};
use crate::migrations::{bring_up, check_current};
use crate::session::Session;

pub(super) mod claim;
pub(super) mod ingest;
mod lease;
mod notify;
mod operator;
mod ownership;
#[cfg(test)]
mod plans;
mod rows;
mod settle;
mod write;

/// The number of connections besides those of the pool.
pub(super) const CONNECTIONS: usize = 3;

/// An outbox table on PostgreSQL, in the service's own database.
///
/// The service's transactions and the operator queries run on the service's pool. Claims, settlements and renewals have
/// a connection each of their own, opened with the options of the pool, so the service cannot exhaust them. Clones share
/// these connections.
#[derive(Clone)]
pub struct OutboxStore {
    pool: PgPool,
    claims: Arc<Session<Postgres>>,
    settlements: Arc<Session<Postgres>>,
    /// Used on the thread of renewals only.
    renewals: Arc<Session<Postgres>>,
    table: TableName,
    mode: Mode,
}

#[async_trait]
impl Pool<OutboxStore> for PgPool {
    async fn open(&self, table: TableName, mode: Mode) -> Result<OutboxStore, OpenError> {
        check_encoding(self).await?;
        for migrator in DIALECT.of_outbox(&table, mode) {
            migrate(self, &table, &migrator).await?;
        }
        Ok(OutboxStore::new(self, table, mode))
    }

    async fn open_existing(&self, table: TableName, mode: Mode) -> Result<OutboxStore, OpenError> {
        check_encoding(self).await?;
        for migrator in DIALECT.of_outbox(&table, mode) {
            check_current(&migrator, &table, &applied(self, &migrator).await?)?;
        }
        Ok(OutboxStore::new(self, table, mode))
    }
}

pub(super) async fn migrate(pool: &PgPool, table: &TableName, migrator: &Migrator) -> Result<(), OpenError> {
    bring_up(migrator, table, &applied(pool, migrator).await?, migrator.run(pool)).await
}

impl OutboxStore {
    fn new(pool: &PgPool, table: TableName, mode: Mode) -> Self {
        let [claims, settlements, renewals] = [(); CONNECTIONS].map(|()| Arc::new(Session::beside(pool)));
        Self { pool: pool.clone(), claims, settlements, renewals, table, mode }
    }

    /// Fills in the name of the table, the database's clock, and which rows are unfinished.
    pub(super) fn sql(&self, template: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(fill(template, &self.table, self.mode))
    }
}

pub(super) fn fill(template: &str, table: &TableName, mode: Mode) -> String {
    // The same condition in two spellings. A statement that looks rows up by their numbers uses the second one, because
    // it must not search the index of pending rows.
    let (unfinished, unfinished_by_number) = match mode {
        Mode::Ordered(DeadHead::Skip) => ("status IN (0, 2)", "status NOT IN (1, 3)"),
        _ => ("status <> 1", "status <> 1"),
    };
    let sql = migrations::fill(template, table).replace("{now}", NOW);
    sql.replace("{unfinished}", unfinished).replace("{unfinished_by_number}", unfinished_by_number)
}

impl Store for OutboxStore {
    fn table(&self) -> &TableName {
        &self.table
    }

    fn mode(&self) -> Mode {
        self.mode
    }

    fn notifier(&self) -> Option<&dyn Notifier> {
        Some(self)
    }

    fn runs_on_own_thread(&self) -> bool {
        true
    }
}
