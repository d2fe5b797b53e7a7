use std::collections::HashSet;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::outbox::{Mode, OutboxStatus, RowUpdate, SettleStore, SettledRows, unblock_limit};
use serde_json::json;
use sqlx::MySqlConnection;

use super::claim::{BLOCKED, LOCK_BLOCKED, UNBLOCK};
use super::{BEGIN_OWN, OutboxStore, list};
use crate::mysql::clock::micros;
use crate::mysql::errors::{doing, is_lock_timeout};
use crate::outbox::limit;
use crate::session::Failed;

/// The condition for rows that may be updated: pending rows that are still claimed under one of the fencing tokens.
/// Binds: the tokens, which contain no comma.
///
/// No row can match the token of another claim among them: this process settles a row only under its current claim.
fn fence(mode: Mode) -> &'static str {
    match mode.leases_rows() {
        true => "pending = 1 AND FIND_IN_SET(locked_by, ?)",
        false => {
            "pending = 1
             AND EXISTS (SELECT 1 FROM {table}_owner WHERE FIND_IN_SET(CONCAT(owner, ':', generation), ?))"
        }
    }
}

/// Those of the rows that may be updated, also those that another transaction has locked. Binds: the rows, the fencing
/// tokens.
pub(super) fn still_claimed(mode: Mode) -> String {
    format!("SELECT seq FROM {{rows}} WHERE {}", fence(mode))
}

/// Locks those of the rows that may be updated and that no other transaction has locked. Binds: the rows, the fencing
/// tokens.
pub(super) fn lock_claimed(mode: Mode) -> String {
    format!("{} FOR UPDATE SKIP LOCKED", still_claimed(mode))
}

/// The same, but it waits a moment for rows that another transaction has locked. Binds: the rows, the fencing tokens.
pub(super) fn wait_for_claimed(mode: Mode) -> String {
    format!("{} FOR UPDATE", still_claimed(mode))
}

/// Marks rows as DONE, the usual case. Binds: the rows, the fencing tokens.
pub(super) fn mark_done(mode: Mode) -> String {
    format!(
        "UPDATE {{rows}} SET status = 1, done_at = {{now}}, locked_by = NULL, locked_at = NULL WHERE {}",
        fence(mode)
    )
}

/// An attempt that has ended shows that the row does not crash its process, so a retry resets `lease_losses`. Binds:
/// the updates (row, status, attempts, wait in microseconds, error), the fencing tokens.
///
/// No assignment reads a column that another one changes, because the server chooses their order.
pub(super) fn update(mode: Mode) -> String {
    format!(
        "UPDATE JSON_TABLE(?, '$[*]' COLUMNS (
             id BIGINT PATH '$[0]', becomes TINYINT PATH '$[1]', tried BIGINT PATH '$[2]', wait BIGINT PATH '$[3]',
             error TEXT CHARACTER SET utf8mb4 PATH '$[4]')) AS listed
         STRAIGHT_JOIN {{table}} FORCE INDEX (PRIMARY) ON seq = listed.id
         SET status = listed.becomes,
             attempts = coalesce(listed.tried, attempts),
             available_at = COALESCE({{now}} + INTERVAL listed.wait MICROSECOND, available_at),
             done_at = CASE WHEN listed.becomes IN (1, 3) THEN {{now}} END,
             last_error = COALESCE(listed.error, last_error),
             locked_by = NULL,
             locked_at = NULL,
             lease_losses = CASE WHEN listed.becomes IN (1, 3) THEN lease_losses ELSE 0 END
         WHERE {}",
        fence(mode)
    )
}

#[async_trait]
impl SettleStore for OutboxStore {
    async fn settle(&self, fencing_tokens: &[String], updates: &[RowUpdate]) -> Result<SettledRows, StoreError> {
        let settle = async {
            if !matches!(self.mode, Mode::Ordered(_)) {
                match self.settle_all(fencing_tokens, updates).await {
                    Ok(Some(settled)) => return Ok(settled),
                    // MySQL does not return which rows it updated or found locked, so the rows that may be updated are
                    // locked first.
                    Ok(None) => {}
                    Err(Failed::Statement(error)) if is_lock_timeout(&error) => {}
                    Err(failed) => return Err(failed),
                }
            }
            self.settle_claimed(fencing_tokens, updates).await
        };
        doing("settle in the outbox", settle).await
    }
}

impl OutboxStore {
    /// Locks the rows that are still claimed under one of the tokens, and updates them.
    async fn settle_claimed(&self, fencing_tokens: &[String], updates: &[RowUpdate]) -> Result<SettledRows, Failed> {
        let mut rows: Vec<i64> = updates.iter().map(|update| update.seq).collect();
        let mut work = self.settlements.begin(BEGIN_OWN).await?;
        let applied: HashSet<i64> =
            self.wait_for_claimed(&mut work, fencing_tokens, &rows).await?.into_iter().collect();
        let updates: Vec<RowUpdate> = updates.iter().filter(|update| applied.contains(&update.seq)).cloned().collect();
        if !updates.is_empty() {
            self.update_rows(&mut work, fencing_tokens, &updates).await?;
        }
        rows.retain(|seq| !applied.contains(seq));
        let mut locked = HashSet::new();
        if !rows.is_empty() {
            let held = sqlx::query_scalar(self.sql(&still_claimed(self.mode)));
            let held = held.bind(list(&rows)).bind(fencing_tokens.join(","));
            locked = held.fetch_all(&mut *work).await?.into_iter().collect();
        }
        if matches!(self.mode, Mode::Ordered(_)) {
            let finished = updates.iter().filter(|update| self.mode.is_finished(update.status));
            let finished: Vec<i64> = finished.map(|update| update.seq).collect();
            // A separate statement, so that it sees the rows that claims blocked while the update above waited for its
            // locks.
            self.unblock_behind(&mut work, &finished).await?;
        }
        work.commit().await?;
        Ok(SettledRows { applied, locked })
    }

    /// The usual case: all rows are still claimed under the tokens, and no other transaction has locked one. Otherwise
    /// it changes nothing and returns `None`.
    async fn settle_all(
        &self,
        fencing_tokens: &[String],
        updates: &[RowUpdate],
    ) -> Result<Option<SettledRows>, Failed> {
        let mut work = self.settlements.begin(BEGIN_OWN).await?;
        let updated = self.update_rows(&mut work, fencing_tokens, updates).await?;
        if updated != updates.len() as u64 {
            sqlx::raw_sql("ROLLBACK").execute(&mut *work).await?;
            work.commit().await?;
            return Ok(None);
        }
        work.commit().await?;
        Ok(Some(SettledRows { applied: updates.iter().map(|update| update.seq).collect(), locked: HashSet::new() }))
    }

    /// Returns how many rows matched, also those that were not changed by the update.
    async fn update_rows(
        &self,
        connection: &mut MySqlConnection,
        fencing_tokens: &[String],
        updates: &[RowUpdate],
    ) -> Result<u64, sqlx::Error> {
        let all_done = updates.iter().all(|update| update.status == OutboxStatus::Done);
        let (sql, updates) = match all_done {
            true => (mark_done(self.mode), list(&updates.iter().map(|update| update.seq).collect::<Vec<_>>())),
            false => (update(self.mode), bound_updates(updates)),
        };
        let updated =
            sqlx::query(self.sql(&sql)).bind(updates).bind(fencing_tokens.join(",")).execute(connection).await?;
        Ok(updated.rows_affected())
    }

    /// Locks those of the rows that are still claimed under one of the tokens.
    ///
    /// `UNLOCKED_PREDECESSORS` locks rows for a moment, so this waits for locked rows. A row that stays locked for
    /// longer is skipped.
    async fn wait_for_claimed(
        &self,
        connection: &mut MySqlConnection,
        fencing_tokens: &[String],
        rows: &[i64],
    ) -> Result<Vec<i64>, sqlx::Error> {
        let wait =
            sqlx::query_scalar(self.sql(&wait_for_claimed(self.mode))).bind(list(rows)).bind(fencing_tokens.join(","));
        match wait.fetch_all(&mut *connection).await {
            Err(error) if is_lock_timeout(&error) => self.lock_claimed(connection, fencing_tokens, rows).await,
            locked => locked,
        }
    }

    /// Locks those of the rows that are still claimed under one of the tokens and that no other transaction has locked.
    pub(super) async fn lock_claimed(
        &self,
        connection: &mut MySqlConnection,
        fencing_tokens: &[String],
        rows: &[i64],
    ) -> Result<Vec<i64>, sqlx::Error> {
        let lock =
            sqlx::query_scalar(self.sql(&lock_claimed(self.mode))).bind(list(rows)).bind(fencing_tokens.join(","));
        lock.fetch_all(connection).await
    }

    /// Unblocks the first rows after these rows, which this transaction has locked, and has finished or is about to
    /// delete.
    pub(super) async fn unblock_behind(
        &self,
        connection: &mut MySqlConnection,
        finished: &[i64],
    ) -> Result<(), sqlx::Error> {
        if finished.is_empty() {
            return Ok(());
        }
        // Rows of one key are seldom finished together, so each counts as a key of its own.
        let blocked =
            sqlx::query_scalar(self.sql(BLOCKED)).bind(list(finished)).bind(limit(unblock_limit(finished.len())) - 1);
        let blocked = blocked.fetch_all(&mut *connection).await?;
        self.unblock(connection, blocked).await
    }

    /// Unblocks rows, so that claims read them again.
    ///
    /// `UNLOCKED_PREDECESSORS` locks rows for a moment, so this waits for locked rows. A row that stays locked for
    /// longer is left to the sweep: a settlement must not fail for a row that is not its own.
    pub(super) async fn unblock(
        &self,
        connection: &mut MySqlConnection,
        mut blocked: Vec<i64>,
    ) -> Result<(), sqlx::Error> {
        if blocked.is_empty() {
            return Ok(());
        }
        blocked.sort_unstable();
        blocked.dedup();
        let unblock = sqlx::query(self.sql(UNBLOCK)).bind(list(&blocked)).execute(&mut *connection).await;
        match unblock {
            Err(error) if is_lock_timeout(&error) => {}
            unblocked => return unblocked.map(|_| ()),
        }
        let free = sqlx::query_scalar(self.sql(LOCK_BLOCKED)).bind(list(&blocked)).fetch_all(&mut *connection).await?;
        if free.is_empty() {
            return Ok(());
        }
        sqlx::query(self.sql(UNBLOCK)).bind(list(&free)).execute(connection).await.map(|_| ())
    }
}

/// The updates as [`update`] reads them.
fn bound_updates(updates: &[RowUpdate]) -> String {
    let updates = updates.iter().map(|update| {
        let RowUpdate { seq, status, attempts, wait, error } = update;
        json!([seq, status.code(), attempts, wait.map(micros), error])
    });
    json!(updates.collect::<Vec<_>>()).to_string()
}
