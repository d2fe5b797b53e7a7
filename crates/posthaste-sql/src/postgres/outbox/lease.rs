use std::collections::HashSet;

use posthaste_core::outbox::{SettledRows, FOUND_AMONG, LeaseSet, Mode};

use super::OutboxStore;
use super::claim::SCAN;
use super::settle::{CHANGE, Locked, chosen};
use crate::session::Failed;

/// The leases of these rows, if they still stand, begin anew. Binds: the locks, the rows.
pub(super) fn renew(mode: Mode, locked: Locked) -> String {
    format!("UPDATE {{table}} AS row SET locked_at = {{now}} WHERE {} RETURNING row.seq", chosen(mode, locked))
}

/// Another process need not wait for the end of these leases. Binds: the locks, the rows.
pub(super) fn release(mode: Mode, locked: Locked) -> String {
    format!(
        "UPDATE {{table}} AS row SET locked_by = NULL, locked_at = NULL WHERE {} RETURNING row.seq",
        chosen(mode, locked)
    )
}

/// Suspects that are about to be delivered. Binds: the lock, the rows, the lock of what has started.
const MARK_STARTED: &str = "UPDATE {table} SET locked_by = $3, locked_at = {now}
     WHERE seq = ANY ($2) AND status NOT IN (1, 3) AND locked_by = $1
     RETURNING seq";

/// Which of these rows exist and are not leased by these locks: one that was committed since the release is. Binds: the
/// locks, the rows.
const EXISTING: &str = "SELECT seq FROM {table}
     WHERE seq = ANY ($2) AND (locked_by IS NULL OR locked_by <> ALL ($1) OR status IN (1, 3))";

/// The leases of the rows of these events. Binds: the locks, the event ids.
const RELEASE_EVENTS: &str = "UPDATE {table} SET locked_by = NULL, locked_at = NULL
     WHERE event_id = ANY ($2) AND status NOT IN (1, 3) AND locked_by = ANY ($1)
     RETURNING seq";

/// Which of these events exist and are not leased by these locks. Binds: the locks, the event ids.
const EXISTING_EVENTS: &str = "SELECT seq FROM {table}
     WHERE event_id = ANY ($2) AND (locked_by IS NULL OR locked_by <> ALL ($1) OR status IN (1, 3))";

/// What these locks hold at the head of the table. No index has locks: it would cost every claim more than this statement,
/// which runs only after the answer to a claim was lost. Whether a row is still ours is asked again when it is changed: another
/// process may have taken it over meanwhile. Binds: the locks.
pub(super) fn release_claims(mode: Mode) -> String {
    let ready = if matches!(mode, Mode::Ordered(_)) { "AND NOT blocked" } else { "" };
    format!(
        "UPDATE {{table}} SET locked_by = NULL, locked_at = NULL
         WHERE seq = ANY (ARRAY(
             SELECT seq FROM (
                 SELECT seq, locked_by FROM {{table}} WHERE status IN (0, 2) {ready} AND available_at <= {{now}}
                 ORDER BY available_at, seq LIMIT {FOUND_AMONG}) AS head
             WHERE locked_by = ANY ($1)))
           AND locked_by = ANY ($1) AND status NOT IN (1, 3)
         RETURNING seq"
    )
}

impl OutboxStore {
    pub(super) async fn renew_leases(&self, claim_ids: &[String], rows: &[i64]) -> Result<SettledRows, Failed> {
        self.change_leases(&self.renewals, |locked| renew(self.mode, locked), claim_ids, rows).await
    }

    pub(super) async fn start_suspects(&self, claim_id: &str, started: &str, rows: &[i64]) -> Result<HashSet<i64>, Failed> {
        let mut work = self.claims.begin(CHANGE).await?;
        let mark = sqlx::query_scalar(self.sql(MARK_STARTED)).bind(claim_id).bind(rows).bind(started);
        let marked = mark.fetch_all(&mut *work).await?;
        work.commit().await?;
        Ok(marked.into_iter().collect())
    }

    /// Answers with the rows that exist and are no longer leased by these locks.
    pub(super) async fn release_leases(&self, leases: &LeaseSet<'_>) -> Result<HashSet<i64>, Failed> {
        match leases {
            LeaseSet::Rows { claim_ids, rows } => {
                let released =
                    self.change_leases(&self.settlements, |locked| release(self.mode, locked), claim_ids, rows).await?;
                if released.rows.len() == rows.len() {
                    return Ok(released.rows);
                }
                let mut work = self.settlements.begin(CHANGE).await?;
                let existing = sqlx::query_scalar(self.sql(EXISTING)).bind(claim_ids).bind(rows);
                let existing = existing.fetch_all(&mut *work).await?;
                work.commit().await?;
                Ok(existing.into_iter().collect())
            }
            LeaseSet::Events { claim_ids, ids } => {
                let mut work = self.settlements.begin(CHANGE).await?;
                sqlx::query(self.sql(RELEASE_EVENTS)).bind(claim_ids).bind(ids).execute(&mut *work).await?;
                let existing = sqlx::query_scalar(self.sql(EXISTING_EVENTS)).bind(claim_ids).bind(ids);
                let existing = existing.fetch_all(&mut *work).await?;
                work.commit().await?;
                Ok(existing.into_iter().collect())
            }
            LeaseSet::Claims { claim_ids } => {
                let mut work = self.settlements.begin(SCAN).await?;
                let release = sqlx::query_scalar(self.sql(&release_claims(self.mode))).bind(claim_ids);
                let released = release.fetch_all(&mut *work).await?;
                work.commit().await?;
                Ok(released.into_iter().collect())
            }
        }
    }
}
