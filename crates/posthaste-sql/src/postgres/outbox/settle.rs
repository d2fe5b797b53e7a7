use std::collections::HashSet;

use posthaste_core::outbox::{RowUpdate, SettledRows, DeadHead, Mode, OutboxStatus};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Postgres, Row};

use super::OutboxStore;
use super::claim::unblock;
use crate::outbox::unblocked;
use crate::postgres::clock::micros;
use crate::postgres::errors::is_lock_timeout;
use crate::session::{Failed, Session};

/// Which rows may be changed: pending ones whose claim still stands. `$1` are the fences of all of them.
///
/// `NOT IN (1, 3)` and not `IN (0, 2)`: with that, a planner that believes the backlog to be small reads all of it by the
/// index of pending rows, in every settlement.
///
/// That a row could be held by another claim among `$1` than its own is excluded by the table of what this process
/// holds, which names each row under its present claim only.
pub(super) fn fence(mode: Mode) -> &'static str {
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
/// Each statement sees what was committed before it, whatever the server's default is: what is unblocked depends on it. A
/// plan that was made while the table was small is kept when it is large: no plan may read the whole of it. A statement
/// that meets a locked row gives up soon, because then it is repeated without the rows that are locked. What a host that
/// vanishes has locked is free after ten seconds.
pub(super) const CHANGE: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
     SET LOCAL enable_seqscan = off; SET LOCAL jit = off; SET LOCAL lock_timeout = '100ms';
     SET LOCAL idle_in_transaction_session_timeout = '10s'";

/// Whether a statement waits for rows that other transactions have locked, a moment, or leaves them alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Locked {
    Wait,
    Skip,
}

/// The rows `$2` whose fence stands, as a condition of an UPDATE.
pub(super) fn chosen(mode: Mode, locked: Locked) -> String {
    let fence = fence(mode);
    match locked {
        Locked::Wait => format!("row.seq = ANY ($2) AND {fence}"),
        Locked::Skip => format!(
            "row.seq = ANY (ARRAY(
                 SELECT row.seq FROM {{table}} AS row WHERE row.seq = ANY ($2) AND {fence} FOR UPDATE SKIP LOCKED))"
        ),
    }
}

/// The rows `$2` whose fence stands, whoever has locked them.
pub(super) fn standing(mode: Mode) -> String {
    format!("SELECT row.seq FROM {{table}} AS row WHERE row.seq = ANY ($2) AND {}", fence(mode))
}

/// What is answered of a changed row: in ordered mode also whose wait it ends.
fn answered(mode: Mode) -> &'static str {
    match mode {
        Mode::Ordered(_) => "row.seq, row.status, row.aggregate_type, row.aggregate_id",
        _ => "row.seq",
    }
}

/// The usual case. Binds: the fences, the rows.
pub(super) fn done(mode: Mode, locked: Locked) -> String {
    let (chosen, answered) = (chosen(mode, locked), answered(mode));
    format!(
        "UPDATE {{table}} AS row SET status = 1, done_at = {{now}}, locked_by = NULL, locked_at = NULL
         WHERE {chosen}
         RETURNING {answered}"
    )
}

/// An attempt that came to an end clears its row of the suspicion that it ends processes. Binds: the fences, and of each
/// change the row, the status, the attempts, the wait in microseconds, the error.
pub(super) fn change(mode: Mode, locked: Locked) -> String {
    let (chosen, answered) = (chosen(mode, locked), answered(mode));
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
         WHERE row.seq = change.seq AND {chosen}
         RETURNING {answered}"
    )
}

impl OutboxStore {
    pub(super) async fn change(&self, fencing_tokens: &[String], changes: &[RowUpdate]) -> Result<SettledRows, Failed> {
        match self.change_once(fencing_tokens, changes, Locked::Wait).await {
            Err(Failed::Statement(error)) if is_lock_timeout(&error) => {
                self.change_once(fencing_tokens, changes, Locked::Skip).await
            }
            changed => changed,
        }
    }

    async fn change_once(&self, fencing_tokens: &[String], changes: &[RowUpdate], locked: Locked) -> Result<SettledRows, Failed> {
        let mut work = self.settlements.begin(CHANGE).await?;
        let rows = self.change_rows(&mut work, fencing_tokens, changes, locked).await?;
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
        let asked = changes.iter().map(|change| change.seq);
        let left: Vec<i64> = asked.filter(|seq| !changed.contains(seq)).collect();
        let still_locked = match locked {
            Locked::Wait => HashSet::new(),
            Locked::Skip => self.standing(&mut work, fencing_tokens, &left).await?,
        };
        // A statement of its own, which sees what was blocked until those rows could be changed.
        self.unblock(&mut work, passed, locked).await?;
        work.commit().await?;
        Ok(SettledRows { rows: changed, locked: still_locked })
    }

    async fn change_rows(
        &self,
        connection: &mut PgConnection,
        fencing_tokens: &[String],
        changes: &[RowUpdate],
        locked: Locked,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        fn column<T>(changes: &[RowUpdate], of: impl Fn(&RowUpdate) -> T) -> Vec<T> {
            changes.iter().map(of).collect()
        }
        let all_done = changes.iter().all(|change| change.status == OutboxStatus::Done);
        let sql = if all_done { done(self.mode, locked) } else { change(self.mode, locked) };
        let mut query = sqlx::query(self.sql(&sql)).bind(fencing_tokens).bind(column(changes, |change| change.seq));
        if !all_done {
            query = query
                .bind(column(changes, |change| change.status.code()))
                .bind(column(changes, |change| change.attempts.map(|attempts| attempts.min(i32::MAX as u32) as i32)))
                .bind(column(changes, |change| change.wait.map(micros)))
                .bind(column(changes, |change| change.error.clone()));
        }
        query.fetch_all(connection).await
    }

    /// Those of the rows whose fence stands.
    async fn standing(
        &self,
        connection: &mut PgConnection,
        fencing_tokens: &[String],
        rows: &[i64],
    ) -> Result<HashSet<i64>, sqlx::Error> {
        let standing = sqlx::query_scalar(self.sql(&standing(self.mode))).bind(fencing_tokens).bind(rows);
        Ok(standing.fetch_all(connection).await?.into_iter().collect())
    }

    /// What waits behind a finished row of these keys may be met again.
    pub(super) async fn unblock(
        &self,
        connection: &mut PgConnection,
        keys: Vec<(String, Option<String>)>,
        locked: Locked,
    ) -> Result<(), sqlx::Error> {
        let keys: HashSet<(String, String)> =
            keys.into_iter().filter_map(|(aggregate_type, id)| Some((aggregate_type, id?))).collect();
        if keys.is_empty() {
            return Ok(());
        }
        let count = unblocked(keys.len());
        let (types, ids): (Vec<String>, Vec<String>) = keys.into_iter().unzip();
        let unblock = sqlx::query(self.sql(&unblock(locked))).bind(types).bind(ids).bind(count as i64);
        unblock.execute(connection).await.map(|_| ())
    }

    /// Runs a statement about the leases of these rows that has a form for each way with locked rows. Answers which rows
    /// it changed, and which it could not because they are locked.
    pub(super) async fn change_leases(
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
        let left: Vec<i64> = rows.iter().copied().filter(|seq| !changed.rows.contains(seq)).collect();
        let mut work = session.begin(CHANGE).await?;
        changed.locked = self.standing(&mut work, claim_ids, &left).await?;
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
        Ok(SettledRows { rows: changed.into_iter().collect(), locked: HashSet::new() })
    }
}
