use std::collections::HashSet;

use posthaste_core::outbox::{Change, DeadHead, Mode, OutboxStatus};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

use super::OutboxStore;
use super::claim::UNPARK;
use crate::begin::begin;
use crate::outbox::UNPARKED;
use crate::postgres::clock::micros;

/// The leases of these rows, if they still stand, begin anew. Binds: the locks, the rows.
pub(super) const RENEW: &str = "UPDATE {table} SET locked_at = {now}
     WHERE seq = ANY ($2) AND status NOT IN (1, 3) AND locked_by = ANY ($1)
     RETURNING seq";

/// Another process need not wait for the end of these leases. Binds: the locks, the rows.
pub(super) const RELEASE: &str = "UPDATE {table} SET locked_by = NULL, locked_at = NULL
     WHERE seq = ANY ($2) AND status NOT IN (1, 3) AND locked_by = ANY ($1)
     RETURNING seq";

/// Which rows may be changed: pending ones whose claim still stands. `$1` are the fences of all of them.
///
/// `NOT IN (1, 3)` and not `IN (0, 2)`: with that, a planner that believes the backlog to be small reads all of it by the
/// index of pending rows, in every settlement.
///
/// That a row could be held by another claim among `$1` than its own is excluded by the table of what this process
/// holds, which names each row under its present claim only.
fn fence(mode: Mode) -> &'static str {
    match mode.leases_rows() {
        true => "row.status NOT IN (1, 3) AND row.locked_by = ANY ($1)",
        false => {
            "row.status NOT IN (1, 3)
             AND EXISTS (SELECT 1 FROM {table}_owner WHERE owner || ':' || generation = ANY ($1))"
        }
    }
}

/// Begins a transaction in which rows are changed that are known by their numbers.
///
/// Each statement sees what was committed before it, whatever the server's default is: what is unparked depends on it. A
/// plan that was made while the table was small is kept when it is large: no plan may read the whole of it. Whoever else
/// has a row is not waited for until the caller loses patience, because the connection would go on waiting; and what a host
/// that vanishes has locked is free after ten seconds.
pub(super) const CHANGE: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
     SET LOCAL enable_seqscan = off; SET LOCAL jit = off; SET LOCAL lock_timeout = '900ms';
     SET LOCAL idle_in_transaction_session_timeout = '10s'";

/// What is answered of a changed row: in ordered mode also whose wait it ends.
fn answered(mode: Mode) -> &'static str {
    match mode {
        Mode::Ordered(_) => "row.seq, row.status, row.aggregate_type, row.aggregate_id",
        _ => "row.seq",
    }
}

/// The usual case. Binds: the fences, the rows.
pub(super) fn done(mode: Mode) -> String {
    let (fence, answered) = (fence(mode), answered(mode));
    format!(
        "UPDATE {{table}} AS row SET status = 1, done_at = {{now}}, locked_by = NULL, locked_at = NULL
         WHERE row.seq = ANY ($2) AND {fence}
         RETURNING {answered}"
    )
}

/// An attempt that came to an end clears its row of the suspicion that it ends processes. Binds: the fences, and of each
/// change the row, the status, the attempts, the wait in microseconds, the error.
pub(super) fn change(mode: Mode) -> String {
    let (fence, answered) = (fence(mode), answered(mode));
    format!(
        "UPDATE {{table}} AS row SET
             status = change.status,
             attempts = coalesce(change.attempts, row.attempts),
             available_at = coalesce({{now}} + change.wait * interval '1 microsecond', row.available_at),
             done_at = CASE WHEN change.status IN (1, 3) THEN {{now}} END,
             last_error = coalesce(change.error, row.last_error),
             locked_by = NULL,
             locked_at = NULL,
             lease_losses = CASE WHEN change.status IN (1, 3) THEN row.lease_losses ELSE 0 END
         FROM unnest($2::bigint[], $3::smallint[], $4::integer[], $5::bigint[], $6::text[])
             AS change (seq, status, attempts, wait, error)
         WHERE row.seq = ANY ($2) AND row.seq = change.seq AND {fence}
         RETURNING {answered}"
    )
}

impl OutboxStore {
    pub(super) async fn change(&self, fences: &[String], changes: &[Change]) -> Result<HashSet<i64>, sqlx::Error> {
        let mut transaction = begin(&self.pool, Some(CHANGE)).await?;
        let rows = self.change_rows(&mut transaction, fences, changes).await?;
        let (mut changed, mut passed) = (HashSet::with_capacity(rows.len()), Vec::new());
        for row in &rows {
            changed.insert(row.try_get(0)?);
            if !matches!(self.mode, Mode::Ordered(_)) {
                continue;
            }
            let passes = match OutboxStatus::of_code(row.try_get::<i16, _>(1)?.into()) {
                OutboxStatus::Done => true,
                OutboxStatus::Dead => self.mode == Mode::Ordered(DeadHead::Skip),
                OutboxStatus::New | OutboxStatus::Retry => false,
            };
            if passes {
                passed.push((row.try_get(2)?, row.try_get(3)?));
            }
        }
        // A statement of its own, which sees what was parked until those rows could be changed.
        self.unpark(&mut transaction, passed).await?;
        transaction.commit().await?;
        Ok(changed)
    }

    async fn change_rows(
        &self,
        connection: &mut PgConnection,
        fences: &[String],
        changes: &[Change],
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        fn column<T>(changes: &[Change], of: impl Fn(&Change) -> T) -> Vec<T> {
            changes.iter().map(of).collect()
        }
        let all_done = changes.iter().all(|change| change.status == OutboxStatus::Done);
        let sql = if all_done { done(self.mode) } else { change(self.mode) };
        let mut query = sqlx::query(self.sql(&sql)).bind(fences).bind(column(changes, |change| change.seq));
        if !all_done {
            query = query
                .bind(column(changes, |change| change.status.code()))
                .bind(column(changes, |change| change.attempts.map(|attempts| attempts.min(i32::MAX as u32) as i32)))
                .bind(column(changes, |change| change.wait.map(micros)))
                .bind(column(changes, |change| change.error.clone()));
        }
        query.fetch_all(connection).await
    }

    /// What waits behind a finished row of these keys may be met again.
    pub(super) async fn unpark(
        &self,
        connection: &mut PgConnection,
        keys: Vec<(String, Option<String>)>,
    ) -> Result<(), sqlx::Error> {
        let keys = keys.into_iter().filter_map(|(aggregate_type, id)| Some((aggregate_type, id?)));
        let (types, ids): (Vec<String>, Vec<String>) = keys.unzip();
        if types.is_empty() {
            return Ok(());
        }
        let unpark = sqlx::query(self.sql(UNPARK)).bind(types).bind(ids).bind(UNPARKED as i64);
        unpark.execute(connection).await.map(|_| ())
    }

    /// Runs a statement about leases, and answers which rows it changed.
    pub(super) async fn change_leases(
        &self,
        sql: &str,
        locks: &[String],
        rows: &[i64],
    ) -> Result<HashSet<i64>, sqlx::Error> {
        let mut transaction = begin(&self.pool, Some(CHANGE)).await?;
        let changed = sqlx::query(self.sql(sql)).bind(locks).bind(rows).fetch_all(&mut *transaction).await?;
        transaction.commit().await?;
        changed.iter().map(|row| row.try_get(0)).collect()
    }
}
