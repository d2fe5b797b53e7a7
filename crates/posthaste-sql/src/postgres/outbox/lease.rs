use std::collections::HashSet;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::outbox::{LOST_CLAIM_SCAN, LeaseSet, LeaseStore, Mode, SettledRows};
use sqlx::Postgres;

use super::OutboxStore;
use super::claim::SCAN;
use super::settle::{CHANGE, Locked, fenced_rows};
use crate::postgres::errors::{doing, is_lock_timeout};
use crate::session::{Failed, Session};

/// Restarts the leases of those rows that are still leased under one of the claim ids. Binds: the claim ids, the rows.
pub(super) fn renew(mode: Mode, locked: Locked) -> String {
    format!("UPDATE {{table}} AS row SET locked_at = {{now}} WHERE {} RETURNING row.seq", fenced_rows(mode, locked))
}

/// Ends the leases of those rows that are still leased under one of the claim ids, so that other processes need not
/// wait for their end. Binds: the claim ids, the rows.
pub(super) fn release(mode: Mode, locked: Locked) -> String {
    format!(
        "UPDATE {{table}} AS row SET locked_by = NULL, locked_at = NULL WHERE {} RETURNING row.seq",
        fenced_rows(mode, locked)
    )
}

/// Replaces the claim id of suspects that are about to be delivered. Binds: the claim id, the rows, the claim id that
/// says that the delivery has started.
const MARK_STARTED: &str = "UPDATE {table} SET locked_by = $3, locked_at = {now}
     WHERE seq = ANY ($2) AND status NOT IN (1, 3) AND locked_by = $1
     RETURNING seq";

/// Those of the rows that exist and are not leased under these claim ids. A row that was committed since the release is
/// still leased under one of them. Binds: the claim ids, the rows.
const EXISTING: &str = "SELECT seq FROM {table}
     WHERE seq = ANY ($2) AND (locked_by IS NULL OR locked_by <> ALL ($1) OR status IN (1, 3))";

/// Ends the leases of the rows of these events. Binds: the claim ids, the event ids.
const RELEASE_EVENTS: &str = "UPDATE {table} SET locked_by = NULL, locked_at = NULL
     WHERE event_id = ANY ($2) AND status NOT IN (1, 3) AND locked_by = ANY ($1)
     RETURNING seq";

/// The rows of these events that exist and are not leased under these claim ids. Binds: the claim ids, the event ids.
const EXISTING_EVENTS: &str = "SELECT seq FROM {table}
     WHERE event_id = ANY ($2) AND (locked_by IS NULL OR locked_by <> ALL ($1) OR status IN (1, 3))";

/// Ends the leases under these claim ids at the head of the table. No index has claim ids: it would cost every claim
/// more than this statement costs, which runs only after the result of a claim was lost. The UPDATE checks the claim id
/// again, because another process may have claimed the row meanwhile. Binds: the claim ids.
pub(super) fn release_claims(mode: Mode) -> String {
    let ready = if matches!(mode, Mode::Ordered(_)) { "AND NOT blocked" } else { "" };
    format!(
        "UPDATE {{table}} SET locked_by = NULL, locked_at = NULL
         WHERE seq = ANY (ARRAY(
             SELECT seq FROM (
                 SELECT seq, locked_by FROM {{table}} WHERE status IN (0, 2) {ready} AND available_at <= {{now}}
                 ORDER BY available_at, seq LIMIT {LOST_CLAIM_SCAN}) AS head
             WHERE locked_by = ANY ($1)))
           AND locked_by = ANY ($1) AND status NOT IN (1, 3)
         RETURNING seq"
    )
}

#[async_trait]
impl LeaseStore for OutboxStore {
    async fn renew(&self, claim_ids: &[String], rows: &[i64]) -> Result<SettledRows, StoreError> {
        let renew = self.change_leases(&self.renewals, |locked| renew(self.mode, locked), claim_ids, rows);
        doing("renew leases", renew).await
    }

    async fn release(&self, leases: &LeaseSet<'_>) -> Result<SettledRows, StoreError> {
        doing("release leases", self.release_leases(leases)).await
    }

    async fn mark_started(
        &self,
        claim_id: &str,
        started_claim_id: &str,
        rows: &[i64],
    ) -> Result<HashSet<i64>, StoreError> {
        let mark = async {
            let mut work = self.claims.begin(CHANGE).await?;
            let mark = sqlx::query_scalar(self.sql(MARK_STARTED)).bind(claim_id).bind(rows).bind(started_claim_id);
            let marked = mark.fetch_all(&mut *work).await?;
            work.commit().await?;
            Ok(marked.into_iter().collect())
        };
        doing("claim from the outbox", mark).await
    }
}

impl OutboxStore {
    async fn release_leases(&self, leases: &LeaseSet<'_>) -> Result<SettledRows, Failed> {
        let free: Vec<i64> = match leases {
            LeaseSet::Rows { claim_ids, rows } => {
                let release = |locked| release(self.mode, locked);
                let released = self.change_leases(&self.settlements, release, claim_ids, rows).await?;
                if released.applied.len() == rows.len() {
                    return Ok(released);
                }
                let mut work = self.settlements.begin(CHANGE).await?;
                let existing = sqlx::query_scalar(self.sql(EXISTING)).bind(claim_ids).bind(rows);
                let existing = existing.fetch_all(&mut *work).await?;
                work.commit().await?;
                existing
            }
            LeaseSet::Events { claim_ids, ids } => {
                let mut work = self.settlements.begin(CHANGE).await?;
                sqlx::query(self.sql(RELEASE_EVENTS)).bind(claim_ids).bind(ids).execute(&mut *work).await?;
                let existing = sqlx::query_scalar(self.sql(EXISTING_EVENTS)).bind(claim_ids).bind(ids);
                let existing = existing.fetch_all(&mut *work).await?;
                work.commit().await?;
                existing
            }
            LeaseSet::Claims { claim_ids } => {
                let mut work = self.settlements.begin(SCAN).await?;
                let release = sqlx::query_scalar(self.sql(&release_claims(self.mode))).bind(claim_ids);
                let released = release.fetch_all(&mut *work).await?;
                work.commit().await?;
                released
            }
        };
        Ok(SettledRows { applied: free.into_iter().collect(), locked: HashSet::new() })
    }

    /// Runs a statement about the leases of these rows. Returns which rows it changed, and which rows it skipped
    /// because another transaction has locked them.
    async fn change_leases(
        &self,
        session: &Session<Postgres>,
        sql: impl Fn(Locked) -> String,
        claim_ids: &[String],
        rows: &[i64],
    ) -> Result<SettledRows, Failed> {
        match self.change_leases_once(session, &sql(Locked::Wait), claim_ids, rows).await {
            Err(Failed::Statement(error)) if is_lock_timeout(&error) => {}
            changed => return changed,
        }
        let mut changed = self.change_leases_once(session, &sql(Locked::Skip), claim_ids, rows).await?;
        let left: Vec<i64> = rows.iter().copied().filter(|seq| !changed.applied.contains(seq)).collect();
        let mut work = session.begin(CHANGE).await?;
        changed.locked = self.still_claimed(&mut work, claim_ids, &left).await?;
        work.commit().await?;
        Ok(changed)
    }

    async fn change_leases_once(
        &self,
        session: &Session<Postgres>,
        sql: &str,
        claim_ids: &[String],
        rows: &[i64],
    ) -> Result<SettledRows, Failed> {
        let mut work = session.begin(CHANGE).await?;
        let changed = sqlx::query_scalar(self.sql(sql)).bind(claim_ids).bind(rows).fetch_all(&mut *work).await?;
        work.commit().await?;
        Ok(SettledRows { applied: changed.into_iter().collect(), locked: HashSet::new() })
    }
}
