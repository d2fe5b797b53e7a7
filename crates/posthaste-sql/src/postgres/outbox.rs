use async_trait::async_trait;
use posthaste_core::outbox::{DeadHead, Mode, Notifier, OpenError, Pool, Store, TableName};
use sqlx::migrate::Migrator;
use sqlx::{AssertSqlSafe, PgPool, Postgres};

use super::clock::NOW;
use super::migrations::{self, DIALECT, check_encoding, newest_applied};
use crate::migrations::bring_up;
use crate::session::Session;

mod claim;
mod lease;
mod notify;
mod operator;
mod ownership;
#[cfg(test)]
mod plans;
mod rows;
mod settle;
mod write;

/// An outbox table on PostgreSQL, in the service's own database.
///
/// The service's transactions and the operator queries run on the service's pool. Claims, settlements and renewals have
/// a connection each of their own, opened with the options of the pool, so the service cannot exhaust them.
pub struct OutboxStore {
    pool: PgPool,
    claims: Session<Postgres>,
    settlements: Session<Postgres>,
    /// Used on the thread of renewals only.
    renewals: Session<Postgres>,
    table: TableName,
    mode: Mode,
}

#[async_trait]
impl Pool<OutboxStore> for PgPool {
    async fn open(&self, table: TableName, mode: Mode) -> Result<OutboxStore, OpenError> {
        check_encoding(self).await?;
        migrate(self, &table, &DIALECT.outbox(&table)).await?;
        if matches!(mode, Mode::Ordered(_)) {
            migrate(self, &table, &DIALECT.ordered(&table)).await?;
        }
        let [claims, settlements, renewals] = [(); 3].map(|()| Session::beside(self));
        Ok(OutboxStore { pool: self.clone(), claims, settlements, renewals, table, mode })
    }
}

pub(super) async fn migrate(pool: &PgPool, table: &TableName, migrator: &Migrator) -> Result<(), OpenError> {
    bring_up(migrator, table, newest_applied(pool, migrator).await?, migrator.run(pool)).await
}

impl OutboxStore {
    /// Fills in the name of the table, the database's clock, and which rows are unfinished.
    fn sql(&self, template: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(fill(template, &self.table, self.mode))
    }
}

fn fill(template: &str, table: &TableName, mode: Mode) -> String {
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
