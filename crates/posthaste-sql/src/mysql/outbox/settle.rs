use std::collections::HashSet;

use posthaste_core::outbox::{RowUpdate, SettledRows, DeadHead, Mode, OutboxStatus};
use serde_json::json;
use sqlx::MySqlConnection;

use super::claim::{LOCK_BLOCKED, BLOCKED, UNBLOCK};
use super::{BEGIN_OWN, OutboxStore, list};
use crate::mysql::clock::micros;
use crate::mysql::errors::is_lock_timeout;
use crate::outbox::unblocked;
use crate::session::Failed;

/// Which rows may be changed: pending ones whose claim still stands. Binds: the fences of all of them, which are ids of
/// ours and hold no comma.
///
/// That a row could be held by another claim among them than its own is excluded by the table of what this process
/// holds, which names each row under its present claim only.
fn fence(mode: Mode) -> &'static str {
    match mode.leases_rows() {
        true => "pending = 1 AND FIND_IN_SET(locked_by, ?)",
        false => {
            "pending = 1
             AND EXISTS (SELECT 1 FROM {table}_owner WHERE FIND_IN_SET(CONCAT(owner, ':', generation), ?))"
        }
    }
}

/// Those of the rows that may be changed, whoever has locked them. Binds: the rows, the fences.
pub(super) fn standing(mode: Mode) -> String {
    format!("SELECT seq FROM {{rows}} WHERE {}", fence(mode))
}

/// Locks those of the rows that may be changed and that no other transaction has locked. Binds: the rows, the fences.
pub(super) fn lock_standing(mode: Mode) -> String {
    format!("{} FOR UPDATE SKIP LOCKED", standing(mode))
}

/// The same, and waits a moment for rows that another transaction has locked. Binds: the rows, the fences.
pub(super) fn wait_for_standing(mode: Mode) -> String {
    format!("{} FOR UPDATE", standing(mode))
}

/// The usual case. Binds: the rows, the fences.
pub(super) fn done(mode: Mode) -> String {
    format!(
        "UPDATE {{rows}} SET status = 1, done_at = {{now}}, locked_by = NULL, locked_at = NULL WHERE {}",
        fence(mode)
    )
}

/// An attempt that came to an end clears its row of the suspicion that it ends processes. Binds: the changes (row, status,
/// the attempts, the wait in microseconds, the error), the fences.
///
/// No assignment reads what another assigns: in which order they are carried out is the server's.
pub(super) fn change(mode: Mode) -> String {
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

impl OutboxStore {
    pub(super) async fn change(&self, fencing_tokens: &[String], changes: &[RowUpdate]) -> Result<SettledRows, Failed> {
        if !matches!(self.mode, Mode::Ordered(_)) {
            match self.change_all(fencing_tokens, changes).await {
                Ok(Some(changed)) => return Ok(changed),
                // Nobody tells which rows were changed or are locked: those that may be changed are locked first.
                Ok(None) => {}
                Err(Failed::Statement(error)) if is_lock_timeout(&error) => {}
                Err(failed) => return Err(failed),
            }
        }
        let mut rows: Vec<i64> = changes.iter().map(|change| change.seq).collect();
        let mut work = self.settlements.begin(BEGIN_OWN).await?;
        let ours: HashSet<i64> = self.wait_for_standing(&mut work, fencing_tokens, &rows).await?.into_iter().collect();
        let changes: Vec<RowUpdate> = changes.iter().filter(|change| ours.contains(&change.seq)).cloned().collect();
        if !changes.is_empty() {
            self.change_rows(&mut work, fencing_tokens, &changes).await?;
        }
        rows.retain(|seq| !ours.contains(seq));
        let mut locked = HashSet::new();
        if !rows.is_empty() {
            let held = sqlx::query_scalar(self.sql(&standing(self.mode))).bind(list(&rows)).bind(fencing_tokens.join(","));
            locked = held.fetch_all(&mut *work).await?.into_iter().collect();
        }
        if matches!(self.mode, Mode::Ordered(_)) {
            let passed = changes.iter().filter(|change| match change.status {
                OutboxStatus::Done => true,
                OutboxStatus::Dead => self.mode == Mode::Ordered(DeadHead::Skip),
                OutboxStatus::New | OutboxStatus::Retry => false,
            });
            let passed: Vec<i64> = passed.map(|change| change.seq).collect();
            // A statement of its own, which sees what was blocked until those rows could be changed.
            self.unblock_behind(&mut work, &passed).await?;
        }
        work.commit().await?;
        Ok(SettledRows { rows: ours, locked })
    }

    /// The usual case: all of them are ours and nobody has locked one. Else nothing is changed.
    async fn change_all(&self, fencing_tokens: &[String], changes: &[RowUpdate]) -> Result<Option<SettledRows>, Failed> {
        let mut work = self.settlements.begin(BEGIN_OWN).await?;
        let changed = self.change_rows(&mut work, fencing_tokens, changes).await?;
        if changed != changes.len() as u64 {
            sqlx::raw_sql("ROLLBACK").execute(&mut *work).await?;
            work.commit().await?;
            return Ok(None);
        }
        work.commit().await?;
        Ok(Some(SettledRows { rows: changes.iter().map(|change| change.seq).collect(), locked: HashSet::new() }))
    }

    /// Answers with how many rows there were to change, also where they are as before.
    async fn change_rows(
        &self,
        connection: &mut MySqlConnection,
        fencing_tokens: &[String],
        changes: &[RowUpdate],
    ) -> Result<u64, sqlx::Error> {
        let all_done = changes.iter().all(|change| change.status == OutboxStatus::Done);
        let (sql, changes) = match all_done {
            true => (done(self.mode), list(&changes.iter().map(|change| change.seq).collect::<Vec<_>>())),
            false => (change(self.mode), bound_changes(changes)),
        };
        let changed = sqlx::query(self.sql(&sql)).bind(changes).bind(fencing_tokens.join(",")).execute(connection).await?;
        Ok(changed.rows_affected())
    }

    /// Whoever checks whether a row is unfinished has it locked for a moment, so rows that are locked are waited for. Only
    /// what somebody has for longer is passed by.
    async fn wait_for_standing(
        &self,
        connection: &mut MySqlConnection,
        fencing_tokens: &[String],
        rows: &[i64],
    ) -> Result<Vec<i64>, sqlx::Error> {
        let wait = sqlx::query_scalar(self.sql(&wait_for_standing(self.mode))).bind(list(rows)).bind(fencing_tokens.join(","));
        match wait.fetch_all(&mut *connection).await {
            Err(error) if is_lock_timeout(&error) => self.lock_standing(connection, fencing_tokens, rows).await,
            locked => locked,
        }
    }

    /// Locks those of the rows whose fence stands and that no other transaction has locked.
    pub(super) async fn lock_standing(
        &self,
        connection: &mut MySqlConnection,
        fencing_tokens: &[String],
        rows: &[i64],
    ) -> Result<Vec<i64>, sqlx::Error> {
        let claim_id = sqlx::query_scalar(self.sql(&lock_standing(self.mode))).bind(list(rows)).bind(fencing_tokens.join(","));
        claim_id.fetch_all(connection).await
    }

    /// What waits behind these rows, which are finished or about to be deleted and locked by this transaction, may be met
    /// again.
    pub(super) async fn unblock_behind(
        &self,
        connection: &mut MySqlConnection,
        finished: &[i64],
    ) -> Result<(), sqlx::Error> {
        if finished.is_empty() {
            return Ok(());
        }
        // Rows of one key are seldom finished together, so each is taken for a key of its own.
        let blocked =
            sqlx::query_scalar(self.sql(BLOCKED)).bind(list(finished)).bind(unblocked(finished.len()) as i64 - 1);
        let blocked = blocked.fetch_all(&mut *connection).await?;
        self.unblock(connection, blocked).await
    }

    /// Whoever checks whether a row is unfinished has it locked for a moment, so rows that are locked are waited for. Only
    /// what somebody has for longer is left to the sweep: a settlement must not fail for a row that is not its own.
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

/// As [`change`] reads them.
fn bound_changes(changes: &[RowUpdate]) -> String {
    let changes = changes.iter().map(|change| {
        let RowUpdate { seq, status, attempts, wait, error } = change;
        json!([seq, status.code(), attempts, wait.map(micros), error])
    });
    json!(changes.collect::<Vec<_>>()).to_string()
}
