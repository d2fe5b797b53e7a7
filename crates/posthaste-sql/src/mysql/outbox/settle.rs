use std::collections::HashSet;

use posthaste_core::outbox::{Change, DeadHead, Mode, OutboxStatus};
use serde_json::json;
use sqlx::MySqlConnection;

use super::claim::{PARKED, UNPARK};
use super::{OutboxStore, list};
use crate::mysql::clock::micros;
use crate::outbox::UNPARKED;

/// The leases of these rows, if they still stand, begin anew. Binds: the rows, the locks.
pub(super) const RENEW: &str = "UPDATE {rows} SET locked_at = {now} WHERE pending = 1 AND FIND_IN_SET(locked_by, ?)";

/// Another process need not wait for the end of these leases. Binds: the rows, the locks.
pub(super) const RELEASE: &str = "UPDATE {rows} SET locked_by = NULL, locked_at = NULL
     WHERE pending = 1 AND FIND_IN_SET(locked_by, ?)";

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

/// Locks those of the rows that may be changed. Binds: the rows, the fences.
pub(super) fn standing(mode: Mode) -> String {
    format!("SELECT seq FROM {{rows}} WHERE {} FOR UPDATE", fence(mode))
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
             error TEXT CHARACTER SET utf8mb4 PATH '$[4]')) AS wanted
         STRAIGHT_JOIN {{table}} FORCE INDEX (PRIMARY) ON seq = wanted.id
         SET status = wanted.becomes,
             attempts = coalesce(wanted.tried, attempts),
             available_at = COALESCE({{now}} + INTERVAL wanted.wait MICROSECOND, available_at),
             done_at = CASE WHEN wanted.becomes IN (1, 3) THEN {{now}} END,
             last_error = COALESCE(wanted.error, last_error),
             locked_by = NULL,
             locked_at = NULL,
             lease_losses = CASE WHEN wanted.becomes IN (1, 3) THEN lease_losses ELSE 0 END
         WHERE {}",
        fence(mode)
    )
}

impl OutboxStore {
    pub(super) async fn change(&self, fences: &[String], changes: &[Change]) -> Result<HashSet<i64>, sqlx::Error> {
        let rows: Vec<i64> = changes.iter().map(|change| change.seq).collect();
        if !matches!(self.mode, Mode::Ordered(_)) {
            let mut transaction = self.transaction().await?;
            let changed = self.change_rows(&mut transaction, fences, changes).await?;
            if changed == rows.len() as u64 {
                transaction.commit().await?;
                return Ok(rows.into_iter().collect());
            }
            // Nobody tells which rows those were: asked for first, and then changed.
            transaction.rollback().await?;
        }
        let mut transaction = self.transaction().await?;
        let standing = self.standing(&mut transaction, &standing(self.mode), fences, &rows).await?;
        let changes: Vec<Change> = changes.iter().filter(|change| standing.contains(&change.seq)).cloned().collect();
        if !changes.is_empty() {
            self.change_rows(&mut transaction, fences, &changes).await?;
        }
        if matches!(self.mode, Mode::Ordered(_)) {
            let passed = changes.iter().filter(|change| match change.status {
                OutboxStatus::Done => true,
                OutboxStatus::Dead => self.mode == Mode::Ordered(DeadHead::Skip),
                OutboxStatus::New | OutboxStatus::Retry => false,
            });
            let passed: Vec<i64> = passed.map(|change| change.seq).collect();
            // A statement of its own, which sees what was parked until those rows could be changed.
            self.unpark_behind(&mut transaction, &passed).await?;
        }
        transaction.commit().await?;
        Ok(standing)
    }

    /// Answers with how many rows there were to change, also where they are as before.
    async fn change_rows(
        &self,
        connection: &mut MySqlConnection,
        fences: &[String],
        changes: &[Change],
    ) -> Result<u64, sqlx::Error> {
        let all_done = changes.iter().all(|change| change.status == OutboxStatus::Done);
        let (sql, changes) = match all_done {
            true => (done(self.mode), list(&changes.iter().map(|change| change.seq).collect::<Vec<_>>())),
            false => (change(self.mode), bound_changes(changes)),
        };
        let changed = sqlx::query(self.sql(&sql)).bind(changes).bind(fences.join(",")).execute(connection).await?;
        Ok(changed.rows_affected())
    }

    /// Locks those of the rows whose fence stands.
    async fn standing(
        &self,
        connection: &mut MySqlConnection,
        sql: &str,
        fences: &[String],
        rows: &[i64],
    ) -> Result<HashSet<i64>, sqlx::Error> {
        let standing = sqlx::query_scalar(self.sql(sql)).bind(list(rows)).bind(fences.join(","));
        Ok(standing.fetch_all(connection).await?.into_iter().collect())
    }

    /// What waits behind these rows, which are finished or about to be deleted and locked by this transaction, may be met
    /// again.
    pub(super) async fn unpark_behind(
        &self,
        connection: &mut MySqlConnection,
        finished: &[i64],
    ) -> Result<(), sqlx::Error> {
        if finished.is_empty() {
            return Ok(());
        }
        let parked = sqlx::query_scalar(self.sql(PARKED)).bind(list(finished)).bind(UNPARKED as i64 - 1);
        let parked = parked.fetch_all(&mut *connection).await?;
        self.unpark(connection, parked).await
    }

    pub(super) async fn unpark(
        &self,
        connection: &mut MySqlConnection,
        mut parked: Vec<i64>,
    ) -> Result<(), sqlx::Error> {
        if parked.is_empty() {
            return Ok(());
        }
        parked.sort_unstable();
        parked.dedup();
        sqlx::query(self.sql(UNPARK)).bind(list(&parked)).execute(connection).await.map(|_| ())
    }

    /// Runs a statement about leases, and answers which rows it changed.
    pub(super) async fn change_leases(
        &self,
        sql: &str,
        locks: &[String],
        rows: &[i64],
    ) -> Result<HashSet<i64>, sqlx::Error> {
        let mut transaction = self.transaction().await?;
        let mut rows: HashSet<i64> = rows.iter().copied().collect();
        loop {
            let mut in_order: Vec<i64> = rows.iter().copied().collect();
            in_order.sort_unstable();
            let change = sqlx::query(self.sql(sql)).bind(list(&in_order)).bind(locks.join(","));
            let changed = change.execute(&mut *transaction).await?.rows_affected();
            if changed == rows.len() as u64 {
                break;
            }
            // Nobody tells which rows those were: asked for first, and then changed.
            transaction.rollback().await?;
            transaction = self.transaction().await?;
            rows = self.standing(&mut transaction, &standing(self.mode), locks, &in_order).await?;
        }
        transaction.commit().await?;
        Ok(rows)
    }
}

/// As [`change`] reads them.
fn bound_changes(changes: &[Change]) -> String {
    let changes = changes.iter().map(|change| {
        let Change { seq, status, attempts, wait, error } = change;
        json!([seq, status.code(), attempts, wait.map(micros), error])
    });
    json!(changes.collect::<Vec<_>>()).to_string()
}
