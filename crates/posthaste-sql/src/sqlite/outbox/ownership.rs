use std::time::{Duration, Instant};

use posthaste_core::StoreError;
use sqlx::{AssertSqlSafe, Row};
use tokio::sync::Mutex;

use super::fill;
use crate::TableName;
use crate::sqlite::Database;
use crate::sqlite::clock::{millis, span};

/// This process's claim to the whole table: one row, leased, whose generation rises with every change of owner.
pub(super) struct Ownership {
    owner: String,
    lease: Duration,
    /// Locked while the row is refreshed, so that many sources refresh it once.
    tenure: Mutex<Option<Tenure>>,
    take: String,
    remaining: String,
    give_up: String,
    void: String,
}

#[derive(Clone, Copy)]
struct Tenure {
    generation: i64,
    /// Before the refreshing statement was sent: the lease ends no earlier than this plus its length.
    refreshed: Instant,
}

/// Who owns the table.
#[derive(Clone, Copy)]
pub(super) enum Owner {
    /// We do, for nine tenths of the lease at least.
    Us { generation: i64 },
    /// Another process does, for this long unless it refreshes its lease.
    Other { remaining: Duration },
}

impl Ownership {
    pub(super) fn new(table: &TableName, lease: Duration) -> Self {
        let sql = |template| fill(template, table);
        Self {
            owner: uuid::Uuid::now_v7().to_string(),
            lease,
            tenure: Mutex::new(None),
            take: sql("UPDATE {table}_owner
                 SET generation = generation + (owner IS NOT ?1), owner = ?1, leased_until = {now_ms} + ?2
                 WHERE owner IS NULL OR owner = ?1 OR leased_until <= {now_ms}
                 RETURNING generation"),
            remaining: sql("SELECT leased_until - {now_ms} FROM {table}_owner"),
            give_up: sql("UPDATE {table}_owner SET owner = NULL, leased_until = 0 WHERE owner = ?"),
            void: sql("UPDATE {table}_owner SET owner = NULL, leased_until = 0 WHERE owner <> ?"),
        }
    }

    pub(super) fn owner(&self) -> &str {
        &self.owner
    }

    /// How long a claim may be relied on: the row may be a tenth of its lease old when a claim is made.
    pub(super) fn dependable_lease(&self) -> Duration {
        self.lease * 9 / 10
    }

    /// Takes or keeps the ownership. The row is written only when the last time is a tenth of the lease ago.
    pub(super) async fn hold(&self, database: &Database) -> Result<Owner, StoreError> {
        let mut tenure = self.tenure.lock().await;
        if let Some(Tenure { generation, refreshed }) = *tenure
            && refreshed.elapsed() < self.lease / 10
        {
            return Ok(Owner::Us { generation });
        }
        let refreshed = Instant::now();
        let owner = self.take(database).await?;
        *tenure = match owner {
            Owner::Us { generation } => Some(Tenure { generation, refreshed }),
            Owner::Other { .. } => None,
        };
        Ok(owner)
    }

    async fn take(&self, database: &Database) -> Result<Owner, StoreError> {
        let (owner, lease) = (self.owner.clone(), millis(self.lease));
        let (take, remaining) = (self.take.clone(), self.remaining.clone());
        database
            .write("take the ownership of the outbox", move |connection| {
                let (owner, take, remaining) = (owner.clone(), take.clone(), remaining.clone());
                Box::pin(async move {
                    let taken =
                        sqlx::query(AssertSqlSafe(take)).bind(owner).bind(lease).fetch_optional(&mut *connection);
                    if let Some(row) = taken.await? {
                        return Ok(Owner::Us { generation: row.try_get(0)? });
                    }
                    let row = sqlx::query(AssertSqlSafe(remaining)).fetch_one(connection).await?;
                    Ok(Owner::Other { remaining: span(row.try_get(0)?) })
                })
            })
            .await
    }

    /// Lets another process take over at once.
    pub(super) async fn give_up(&self, database: &Database) -> Result<(), StoreError> {
        let mut tenure = self.tenure.lock().await;
        self.execute(database, &self.give_up).await?;
        *tenure = None;
        Ok(())
    }

    /// Ends another process's lease.
    pub(super) async fn void(&self, database: &Database) -> Result<(), StoreError> {
        self.execute(database, &self.void).await
    }

    async fn execute(&self, database: &Database, sql: &str) -> Result<(), StoreError> {
        let (owner, sql) = (self.owner.clone(), sql.to_owned());
        database
            .write("give up the ownership of the outbox", move |connection| {
                let (owner, sql) = (owner.clone(), sql.clone());
                Box::pin(async move {
                    sqlx::query(AssertSqlSafe(sql)).bind(owner).execute(connection).await?;
                    Ok(())
                })
            })
            .await
    }
}
