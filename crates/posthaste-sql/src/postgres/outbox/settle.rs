use std::collections::HashSet;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::outbox::{Mode, OutboxStatus, RowUpdate, SettleStore, SettledRows, unblock_limit};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

use super::OutboxStore;
use super::claim::unblock;
use crate::outbox::limit;
use crate::postgres::clock::micros;
use crate::postgres::errors::{doing, is_lock_timeout};
use crate::session::Failed;

/// The condition for rows that may be updated: pending rows that are still claimed under one of the fencing tokens
/// `$1`.
///
/// `NOT IN (1, 3)` and not `IN (0, 2)`: with the latter, a planner that believes the backlog to be small reads all of
/// it by the index of pending rows, in every settlement.
///
/// No row can match the token of another claim among `$1`: this process settles a row only under its current claim.
pub(super) fn fence(mode: Mode) -> &'static str {
    match mode.leases_rows() {
        true => "row.status NOT IN (1, 3) AND row.locked_by = ANY ($1)",
        false => {
            "row.status NOT IN (1, 3)
             AND EXISTS (SELECT 1 FROM {table}_owner WHERE owner || ':' || generation = ANY ($1))"
        }
    }
}

/// Begins a transaction that changes rows by their numbers.
///
/// Each statement sees every commit before it, whatever the server's default is: unblocking depends on that. A plan
/// that was made while the table was small is kept when it is large, so no plan may read the whole table. A statement
/// that waits for a locked row gives up soon, and is then repeated without the locked rows. The locks of a host that
/// vanishes are released after ten seconds.
pub(super) const CHANGE: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
     SET LOCAL enable_seqscan = off; SET LOCAL jit = off; SET LOCAL lock_timeout = '100ms';
     SET LOCAL idle_in_transaction_session_timeout = '10s'";

/// What a statement does with rows that other transactions have locked: it waits for them a moment, or skips them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Locked {
    Wait,
    Skip,
}

/// The rows `$2` that are still claimed under one of the tokens, as a condition of an UPDATE.
pub(super) fn fenced_rows(mode: Mode, locked: Locked) -> String {
    let fence = fence(mode);
    match locked {
        Locked::Wait => format!("row.seq = ANY ($2) AND {fence}"),
        Locked::Skip => format!(
            "row.seq = ANY (ARRAY(
                 SELECT row.seq FROM {{table}} AS row WHERE row.seq = ANY ($2) AND {fence} FOR UPDATE SKIP LOCKED))"
        ),
    }
}

/// The rows `$2` that are still claimed under one of the tokens, also those that another transaction has locked.
pub(super) fn still_claimed(mode: Mode) -> String {
    format!("SELECT row.seq FROM {{table}} AS row WHERE row.seq = ANY ($2) AND {}", fence(mode))
}

/// The columns that are returned of an updated row. In ordered mode they include its aggregate, whose next rows may be
/// unblocked.
fn returned(mode: Mode) -> &'static str {
    match mode {
        Mode::Ordered(_) => "row.seq, row.status, row.aggregate_type, row.aggregate_id",
        _ => "row.seq",
    }
}

/// Marks rows as DONE, the usual case. Binds: the fencing tokens, the rows.
pub(super) fn mark_done(mode: Mode, locked: Locked) -> String {
    let (fenced, returned) = (fenced_rows(mode, locked), returned(mode));
    format!(
        "UPDATE {{table}} AS row SET status = 1, done_at = {{now}}, locked_by = NULL, locked_at = NULL
         WHERE {fenced}
         RETURNING {returned}"
    )
}

/// An attempt that has ended shows that the row does not crash its process, so a retry resets `lease_losses`. Binds:
/// the fencing tokens, and of each update the row, the status, the attempts, the wait in microseconds, the error.
pub(super) fn update(mode: Mode, locked: Locked) -> String {
    let (fenced, returned) = (fenced_rows(mode, locked), returned(mode));
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
         WHERE row.seq = change.seq AND {fenced}
         RETURNING {returned}"
    )
}

#[async_trait]
impl SettleStore for OutboxStore {
    async fn settle(&self, fencing_tokens: &[String], updates: &[RowUpdate]) -> Result<SettledRows, StoreError> {
        let settle = async {
            match self.settle_once(fencing_tokens, updates, Locked::Wait).await {
                Err(Failed::Statement(error)) if is_lock_timeout(&error) => {
                    self.settle_once(fencing_tokens, updates, Locked::Skip).await
                }
                settled => settled,
            }
        };
        doing("settle in the outbox", settle).await
    }
}

impl OutboxStore {
    async fn settle_once(
        &self,
        fencing_tokens: &[String],
        updates: &[RowUpdate],
        locked: Locked,
    ) -> Result<SettledRows, Failed> {
        let mut work = self.settlements.begin(CHANGE).await?;
        let rows = self.update_rows(&mut work, fencing_tokens, updates, locked).await?;
        let (mut applied, mut finished) = (HashSet::with_capacity(rows.len()), Vec::new());
        for row in &rows {
            applied.insert(row.try_get(0)?);
            if matches!(self.mode, Mode::Ordered(_))
                && self.mode.is_finished(OutboxStatus::of_code(row.try_get::<i16, _>(1)?.into()))
            {
                finished.push((row.try_get(2)?, row.try_get(3)?));
            }
        }
        let asked = updates.iter().map(|update| update.seq);
        let left: Vec<i64> = asked.filter(|seq| !applied.contains(seq)).collect();
        let still_locked = match locked {
            Locked::Wait => HashSet::new(),
            Locked::Skip => self.still_claimed(&mut work, fencing_tokens, &left).await?,
        };
        // A separate statement, so that it sees the rows that claims blocked while the update above waited for its
        // locks.
        self.unblock(&mut work, finished, locked).await?;
        work.commit().await?;
        Ok(SettledRows { applied, locked: still_locked })
    }

    async fn update_rows(
        &self,
        connection: &mut PgConnection,
        fencing_tokens: &[String],
        updates: &[RowUpdate],
        locked: Locked,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        fn column<T>(updates: &[RowUpdate], of: impl Fn(&RowUpdate) -> T) -> Vec<T> {
            updates.iter().map(of).collect()
        }
        let all_done = updates.iter().all(|update| update.status == OutboxStatus::Done);
        let sql = if all_done { mark_done(self.mode, locked) } else { update(self.mode, locked) };
        let mut query = sqlx::query(self.sql(&sql)).bind(fencing_tokens).bind(column(updates, |update| update.seq));
        if !all_done {
            query = query
                .bind(column(updates, |update| update.status.code()))
                .bind(column(updates, |update| update.attempts.map(|attempts| attempts.min(i32::MAX as u32) as i32)))
                .bind(column(updates, |update| update.wait.map(micros)))
                .bind(column(updates, |update| update.error.clone()));
        }
        query.fetch_all(connection).await
    }

    /// Those of the rows that are still claimed under one of the tokens.
    pub(super) async fn still_claimed(
        &self,
        connection: &mut PgConnection,
        fencing_tokens: &[String],
        rows: &[i64],
    ) -> Result<HashSet<i64>, sqlx::Error> {
        let held = sqlx::query_scalar(self.sql(&still_claimed(self.mode))).bind(fencing_tokens).bind(rows);
        Ok(held.fetch_all(connection).await?.into_iter().collect())
    }

    /// Unblocks the first rows after the finished rows of these keys.
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
        let count = unblock_limit(keys.len());
        let (types, ids): (Vec<String>, Vec<String>) = keys.into_iter().unzip();
        let unblock = sqlx::query(self.sql(&unblock(locked))).bind(types).bind(ids).bind(limit(count));
        unblock.execute(connection).await.map(|_| ())
    }
}
