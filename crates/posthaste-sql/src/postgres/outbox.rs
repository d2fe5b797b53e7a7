use std::collections::HashSet;
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::outbox::{
    RowUpdate, SettledRows, DeadFilter, DeadHead, InTransaction, LeaseSet, Mode, Notes, OpenError, OutboxRow, Owner, Pool,
    Purge, Reader, Registration, Store, TableName, ClaimedRows, OperatorStore, ClaimRequest,
};
use posthaste_core::{Event, StoreError, Wakeup};
use sqlx::migrate::Migrator;
use sqlx::postgres::{PgListener, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgConnection, PgPool, Postgres, Transaction};

use super::clock::NOW;
use super::errors::{commit_error, session_error, store_error};
use super::migrations;
use crate::begin::begin;
use crate::migrations::bring_up;
use crate::outbox::Sweeper;
use crate::session::Session;

mod claim;
mod insert;
mod lease;
mod ownership;
#[cfg(test)]
mod plans;
mod rows;
mod settle;
mod operator;

/// An outbox table on PostgreSQL. It lies in the service's own database.
///
/// The service's transactions and what operators ask run on the service's pool. Claims, settlements and renewals have a
/// connection each of their own, opened with the pool's options: the service cannot take them away.
pub struct OutboxStore {
    pool: PgPool,
    claims: Session<Postgres>,
    settlements: Session<Postgres>,
    /// Used on the thread of renewals only.
    renewals: Session<Postgres>,
    table: TableName,
    mode: Mode,
    sweeper: Sweeper,
}

#[async_trait]
impl Pool<OutboxStore> for PgPool {
    async fn open(&self, table: TableName, mode: Mode) -> Result<OutboxStore, OpenError> {
        let encoding = sqlx::query_scalar("SELECT current_setting('server_encoding')").fetch_one(self);
        let encoding: String = encoding.await.map_err(|error| store_error("open the outbox", error))?;
        if encoding != "UTF8" {
            let problem = format!("database has the encoding {encoding}");
            return Err(OpenError::Unsuitable { problem, remedy: "create it with ENCODING 'UTF8'".to_owned() });
        }
        migrate(self, &table, &migrations::outbox(&table)).await?;
        if matches!(mode, Mode::Ordered(_)) {
            migrate(self, &table, &migrations::ordered(&table)).await?;
        }
        let [claims, settlements, renewals] = [(); 3].map(|()| Session::beside(self));
        Ok(OutboxStore { pool: self.clone(), claims, settlements, renewals, table, mode, sweeper: Sweeper::new() })
    }
}

pub(super) async fn migrate(pool: &PgPool, table: &TableName, migrator: &Migrator) -> Result<(), OpenError> {
    let history = &*migrator.table_name;
    let failed = |error| store_error("read the history of the outbox", error);
    let is_there = sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL").bind(history);
    let found: Option<i64> = match is_there.fetch_one(pool).await.map_err(failed)? {
        true => {
            let newest = AssertSqlSafe(format!("SELECT max(version) FROM {history}"));
            sqlx::query_scalar(newest).fetch_one(pool).await.map_err(failed)?
        }
        false => None,
    };
    bring_up(migrator, table, found, migrator.run(pool)).await
}

impl OutboxStore {
    /// Fills in the table's name, as the migrations do, and the database's clock, and what is unfinished.
    fn sql(&self, template: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(fill(template, &self.table, self.mode))
    }

    /// What other processes listen for.
    fn channel(&self) -> String {
        format!("posthaste_{}", self.table.to_lowercase())
    }
}

fn fill(template: &str, table: &TableName, mode: Mode) -> String {
    // The same in two spellings: rows that are looked up by their numbers must not be looked for in the index of what is
    // pending.
    let (unfinished, standing) = match mode {
        Mode::Ordered(DeadHead::Skip) => ("status IN (0, 2)", "status NOT IN (1, 3)"),
        _ => ("status <> 1", "status <> 1"),
    };
    let sql = migrations::fill(template, table).replace("{now}", NOW);
    sql.replace("{unfinished}", unfinished).replace("{standing}", standing)
}

#[async_trait]
impl Store for OutboxStore {
    type Connection = PgConnection;
    type Transaction = Transaction<'static, Postgres>;

    fn table(&self) -> &TableName {
        &self.table
    }

    fn mode(&self) -> Mode {
        self.mode
    }

    async fn register(&self, reader: Reader, lease: Duration) -> Result<Registration, StoreError> {
        self.register_reader(reader, lease).await.map_err(|error| store_error("open the outbox", error))
    }

    async fn acquire_ownership(&self, owner: &str, lease: Duration) -> Result<Owner, StoreError> {
        self.take_ownership(owner, lease)
            .await
            .map_err(|error| session_error("take the ownership of the outbox", error))
    }

    async fn release_ownership(&self, owner: &str) -> Result<(), StoreError> {
        self.end_ownership(owner).await.map_err(|error| session_error("give up the ownership of the outbox", error))
    }

    async fn begin(&self) -> Result<Self::Transaction, StoreError> {
        begin(&self.pool, None).await.map_err(|error| store_error("begin a transaction", error))
    }

    async fn commit(&self, transaction: Self::Transaction) -> Result<(), StoreError> {
        transaction.commit().await.map_err(|error| commit_error("commit a transaction", error))
    }

    async fn rollback(&self, transaction: Self::Transaction) -> Result<(), StoreError> {
        transaction.rollback().await.map_err(|error| store_error("roll back a transaction", error))
    }

    async fn insert(
        &self,
        connection: &mut PgConnection,
        events: &[&Event],
        claim_id: Option<&str>,
    ) -> Result<Vec<i64>, StoreError> {
        self.insert_all(connection, events, claim_id).await.map_err(|error| store_error("write to the outbox", error))
    }

    async fn surviving(&self, connection: &mut PgConnection, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        // PostgreSQL answers the COMMIT of a transaction in which a statement has failed as if it were well; any other
        // statement is refused in it. To look for the rows themselves would cost a transaction half its time.
        let look = sqlx::query("SELECT 1").execute(connection).await;
        look.map_err(|error| store_error("commit a transaction", error))?;
        Ok(rows.iter().copied().collect())
    }

    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, StoreError> {
        let taken = match self.mode {
            Mode::MultiNode => self.lease_due(request).await,
            Mode::Ordered(_) => self.lease_runs(request).await,
            Mode::SingleNode | Mode::WriterOnly => self.read_due(request).await,
        };
        taken.map_err(|error| session_error("claim from the outbox", error))
    }

    async fn mark_started(&self, claim_id: &str, started: &str, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        let marked = self.start_suspects(claim_id, started, rows).await;
        marked.map_err(|error| session_error("claim from the outbox", error))
    }

    async fn next_due(&self, request: &ClaimRequest<'_>) -> Result<Option<Duration>, StoreError> {
        self.first_due(request).await.map_err(|error| session_error("claim from the outbox", error))
    }

    async fn settle(&self, fencing_tokens: &[String], changes: &[RowUpdate]) -> Result<SettledRows, StoreError> {
        self.change(fencing_tokens, changes).await.map_err(|error| session_error("settle in the outbox", error))
    }

    async fn renew(&self, claim_ids: &[String], rows: &[i64]) -> Result<SettledRows, StoreError> {
        self.renew_leases(claim_ids, rows).await.map_err(|error| session_error("renew leases", error))
    }

    async fn release(&self, leases: &LeaseSet<'_>) -> Result<HashSet<i64>, StoreError> {
        self.release_leases(leases).await.map_err(|error| session_error("release leases", error))
    }

    fn runs_on_own_thread(&self) -> bool {
        true
    }

    async fn pending_types(&self) -> Result<Vec<String>, StoreError> {
        self.due_types().await.map_err(|error| session_error("list the pending event types of the outbox", error))
    }

    fn tells_others(&self) -> bool {
        true
    }

    async fn notify(&self) -> Result<(), StoreError> {
        let notify = sqlx::query("SELECT pg_notify($1, '')").bind(self.channel()).execute(&self.pool).await;
        notify.map(|_| ()).map_err(|error| store_error("notify other processes", error))
    }

    async fn listen(&self, wakeup: Wakeup) -> Result<(), StoreError> {
        let failed = |error| store_error("listen for other processes", error);
        // A connection of its own: one that listens all the time would be missing in the service's pool.
        let pool = PgPoolOptions::new().max_connections(1).max_lifetime(None).idle_timeout(None);
        let pool = pool.connect_lazy_with((*self.pool.connect_options()).clone());
        let mut listener = PgListener::connect_with(&pool).await.map_err(failed)?;
        listener.listen(&self.channel()).await.map_err(failed)?;
        loop {
            // Also before the first is heard: what was said earlier was not.
            wakeup.wake();
            // `None` is a lost connection that was made anew: something may have been said in between.
            listener.try_recv().await.map_err(failed)?;
        }
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
        let replayed = self.replay_dead(filter, after, limit).await;
        replayed.map_err(|error| store_error("replay dead events of the outbox", error))
    }

    async fn discard(&self, event_id: &str) -> Result<bool, StoreError> {
        self.discard_dead(event_id).await.map_err(|error| store_error("discard a dead event of the outbox", error))
    }

    async fn purge(&self, purge: Purge, older_than: Duration, limit: usize) -> Result<u64, StoreError> {
        self.purge_rows(purge, older_than, limit).await.map_err(|error| store_error("purge the outbox", error))
    }

    async fn oldest_due(&self) -> Result<Option<Duration>, StoreError> {
        self.age_of_oldest_due().await.map_err(|error| store_error("look at the head of the outbox", error))
    }
}

impl InTransaction<OutboxStore> for Transaction<'_, Postgres> {
    fn parts(&mut self) -> (&mut PgConnection, Option<&mut Notes<OutboxStore>>) {
        (self, None)
    }
}
