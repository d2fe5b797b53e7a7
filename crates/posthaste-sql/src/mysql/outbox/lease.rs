use std::collections::HashSet;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::outbox::{LOST_CLAIM_SCAN, LeaseSet, LeaseStore, Mode, SettledRows};
use sqlx::MySql;

use super::settle::still_claimed;
use super::{BEGIN_OWN, OutboxStore, list};
use crate::mysql::errors::doing;
use crate::session::{Failed, Session};

/// Restarts the leases of these rows, which this transaction has locked. Binds: the rows.
pub(super) const RENEW: &str = "UPDATE {rows} SET locked_at = {now}";

/// Ends the leases of these rows, which this transaction has locked, so that other processes need not wait for their
/// end. Binds: the rows.
pub(super) const RELEASE: &str = "UPDATE {rows} SET locked_by = NULL, locked_at = NULL";

/// Replaces the claim id of suspects that are about to be delivered. Binds: the rows, the claim id that says that the
/// delivery has started.
const MARK_STARTED: &str = "UPDATE {rows} SET locked_by = ?, locked_at = {now}";

/// Those of the rows that exist. Binds: the rows.
const EXISTING: &str = "SELECT seq FROM {rows}";

/// The rows of these events that exist. Binds: the event ids, a JSON array.
const EXISTING_EVENTS: &str = "SELECT seq
     FROM JSON_TABLE(?, '$[*]' COLUMNS (id VARCHAR(128) PATH '$')) AS listed
     STRAIGHT_JOIN {table} ON event_id = CONVERT(listed.id USING utf8mb4) COLLATE utf8mb4_bin";

/// The rows at the head of the table that are leased under these claim ids. No index has claim ids: it would cost every
/// claim more than this statement costs, which runs only after the result of a claim was lost. Binds: the claim ids.
pub(super) fn of_claims(mode: Mode) -> String {
    let (index, which) = match mode {
        Mode::Ordered(_) => ("ready", "ready = 1"),
        _ => ("pending", "pending = 1"),
    };
    format!(
        "SELECT seq FROM (
             SELECT seq, locked_by FROM {{table}} FORCE INDEX ({{table}}_{index})
             WHERE {which} AND available_at <= {{now}} ORDER BY available_at, seq LIMIT {LOST_CLAIM_SCAN}) AS head
         WHERE FIND_IN_SET(locked_by, ?)"
    )
}

#[async_trait]
impl LeaseStore for OutboxStore {
    async fn renew(&self, claim_ids: &[String], rows: &[i64]) -> Result<SettledRows, StoreError> {
        doing("renew leases", self.change_leases(&self.renewals, RENEW, claim_ids, rows)).await
    }

    async fn release(&self, leases: &LeaseSet<'_>) -> Result<SettledRows, StoreError> {
        let release = async {
            let (claim_ids, rows) = self.rows_of(leases).await?;
            let SettledRows { locked, .. } = self.change_leases(&self.settlements, RELEASE, claim_ids, &rows).await?;
            Ok(SettledRows { applied: rows.into_iter().filter(|seq| !locked.contains(seq)).collect(), locked })
        };
        doing("release leases", release).await
    }

    async fn mark_started(
        &self,
        claim_id: &str,
        started_claim_id: &str,
        rows: &[i64],
    ) -> Result<HashSet<i64>, StoreError> {
        let mark = async {
            let mut work = self.claims.begin(BEGIN_OWN).await?;
            let ours = self.lock_claimed(&mut work, &[claim_id.to_owned()], rows).await?;
            if !ours.is_empty() {
                let mark = sqlx::query(self.sql(MARK_STARTED)).bind(list(&ours)).bind(started_claim_id);
                mark.execute(&mut *work).await?;
            }
            work.commit().await?;
            Ok(ours.into_iter().collect())
        };
        doing("claim from the outbox", mark).await
    }
}

impl OutboxStore {
    /// The claim ids of a set of leases, and the rows of it that exist.
    async fn rows_of<'a>(&self, leases: &LeaseSet<'a>) -> Result<(&'a [String], Vec<i64>), Failed> {
        let mut work = self.settlements.begin(BEGIN_OWN).await?;
        let (claim_ids, query) = match leases {
            LeaseSet::Rows { claim_ids, rows } => (claim_ids, sqlx::query_scalar(self.sql(EXISTING)).bind(list(rows))),
            LeaseSet::Events { claim_ids, ids } => {
                let ids = serde_json::to_string(ids).map_err(|error| sqlx::Error::Encode(error.into()))?;
                (claim_ids, sqlx::query_scalar(self.sql(EXISTING_EVENTS)).bind(ids))
            }
            LeaseSet::Claims { claim_ids } => {
                (claim_ids, sqlx::query_scalar(self.sql(&of_claims(self.mode))).bind(claim_ids.join(",")))
            }
        };
        let rows = query.fetch_all(&mut *work).await?;
        work.commit().await?;
        Ok((claim_ids, rows))
    }

    /// Runs a statement about the leases of those rows that are still leased under one of the claim ids. Returns which
    /// rows it changed, and which rows it skipped because another transaction has locked them.
    async fn change_leases(
        &self,
        session: &Session<MySql>,
        sql: &'static str,
        claim_ids: &[String],
        rows: &[i64],
    ) -> Result<SettledRows, Failed> {
        if rows.is_empty() {
            return Ok(SettledRows::default());
        }
        let mut in_order = rows.to_vec();
        in_order.sort_unstable();
        let mut work = session.begin(BEGIN_OWN).await?;
        let ours = self.lock_claimed(&mut work, claim_ids, &in_order).await?;
        if !ours.is_empty() {
            sqlx::query(self.sql(sql)).bind(list(&ours)).execute(&mut *work).await?;
        }
        let ours: HashSet<i64> = ours.into_iter().collect();
        in_order.retain(|seq| !ours.contains(seq));
        let mut locked = HashSet::new();
        if !in_order.is_empty() {
            let held =
                sqlx::query_scalar(self.sql(&still_claimed(self.mode))).bind(list(&in_order)).bind(claim_ids.join(","));
            locked = held.fetch_all(&mut *work).await?.into_iter().collect();
        }
        work.commit().await?;
        Ok(SettledRows { applied: ours, locked })
    }
}
