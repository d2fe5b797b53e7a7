use std::time::{Duration, Instant};

use posthaste_core::StoreError;
use sqlx::{AssertSqlSafe, PgPool, Row};
use tokio::sync::Mutex;

use super::fill;
use crate::TableName;
use crate::postgres::clock::{micros, span};
use crate::postgres::faults::store_error;

/// This process's claim to the whole table: one row, leased, whose generation rises with every change of owner.
pub(super) struct Ownership {
    owner: String,
    lease: Duration,
    /// Locked while the row is refreshed, so that many sources refresh it once.
    tenure: Mutex<Option<Tenure>>,
    take: String,
    remaining: String,
    give_up: String,
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
                 SET generation = generation + (owner IS DISTINCT FROM $1)::integer, owner = $1,
                     leased_until = {now} + $2 * interval '1 microsecond'
                 WHERE owner IS NULL OR owner = $1 OR leased_until <= {now}
                 RETURNING generation"),
            remaining: sql("SELECT (extract(epoch FROM leased_until - {now}) * 1000000)::bigint FROM {table}_owner"),
            give_up: sql("UPDATE {table}_owner SET owner = NULL, leased_until = {now} WHERE owner = $1"),
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
    pub(super) async fn hold(&self, pool: &PgPool) -> Result<Owner, StoreError> {
        let mut tenure = self.tenure.lock().await;
        if let Some(Tenure { generation, refreshed }) = *tenure
            && refreshed.elapsed() < self.lease / 10
        {
            return Ok(Owner::Us { generation });
        }
        let refreshed = Instant::now();
        let failed = |error| store_error("take the ownership of the outbox", error);
        let owner = self.take(pool).await.map_err(failed)?;
        *tenure = match owner {
            Owner::Us { generation } => Some(Tenure { generation, refreshed }),
            Owner::Other { .. } => None,
        };
        Ok(owner)
    }

    async fn take(&self, pool: &PgPool) -> Result<Owner, sqlx::Error> {
        let take = sqlx::query(AssertSqlSafe(self.take.as_str())).bind(&self.owner).bind(micros(self.lease));
        if let Some(row) = take.fetch_optional(pool).await? {
            return Ok(Owner::Us { generation: row.try_get(0)? });
        }
        let row = sqlx::query(AssertSqlSafe(self.remaining.as_str())).fetch_one(pool).await?;
        Ok(Owner::Other { remaining: span(row.try_get(0)?) })
    }

    /// Lets another process take over at once.
    pub(super) async fn give_up(&self, pool: &PgPool) -> Result<(), StoreError> {
        let mut tenure = self.tenure.lock().await;
        let give_up = sqlx::query(AssertSqlSafe(self.give_up.as_str())).bind(&self.owner).execute(pool).await;
        give_up.map_err(|error| store_error("give up the ownership of the outbox", error))?;
        *tenure = None;
        Ok(())
    }
}
