use std::collections::{BTreeSet, HashSet};

use posthaste_core::{Disposition, Failure, StoreError};
use sqlx::{AssertSqlSafe, Row};

use super::lane::Lane;
use super::{Outbox, fill};
use crate::TableName;
use crate::outbox::{Mode, OutboxStatus, error_text};
use crate::postgres::clock::micros;
use crate::postgres::faults::store_error;

/// What is to be recorded of some rows, each once, in one statement and so in one transaction.
#[derive(Default)]
pub(super) struct Records {
    /// What must still stand for the rows to be changed, see [`fence`].
    fences: BTreeSet<String>,
    changes: Vec<Change>,
}

struct Change {
    seq: i64,
    status: OutboxStatus,
    counted: bool,
    /// In microseconds of the database's time.
    wait: Option<i64>,
    error: Option<String>,
}

impl Records {
    pub(super) fn settle(&mut self, seq: i64, fence: String, disposition: &Disposition) {
        let change = match disposition {
            Disposition::Done => Change { seq, status: OutboxStatus::Done, counted: false, wait: None, error: None },
            Disposition::Retry { after, counted, failure } => Change {
                seq,
                // A wait that nobody is to blame for leaves the row as good as new.
                status: if *counted || failure.is_some() { OutboxStatus::Retry } else { OutboxStatus::New },
                counted: *counted,
                wait: Some(micros(*after)),
                error: failure.as_ref().map(error_text),
            },
            Disposition::Dead(failure) => return self.dead(seq, fence, failure),
        };
        self.fences.insert(fence);
        self.changes.push(change);
    }

    pub(super) fn dead(&mut self, seq: i64, fence: String, failure: &Failure) {
        self.fences.insert(fence);
        let error = Some(error_text(failure));
        self.changes.push(Change { seq, status: OutboxStatus::Dead, counted: false, wait: None, error });
    }

    fn column<T>(&self, of: impl Fn(&Change) -> T) -> Vec<T> {
        self.changes.iter().map(of).collect()
    }
}

/// Which rows may be changed: pending ones whose claim still stands. `$1` are the fences of all of them.
///
/// `NOT IN (1, 3)` and not `IN (0, 2)`: with that, a planner that believes the backlog to be small reads all of it by the
/// index of pending rows, in every settlement.
///
/// That a row could be held by another claim among `$1` than its own is excluded by the table of what this process
/// holds, which names each row under its present claim only.
pub(super) fn fence(mode: Mode) -> &'static str {
    match mode {
        Mode::SingleNode => {
            "row.status NOT IN (1, 3)
             AND EXISTS (SELECT 1 FROM {table}_owner WHERE owner || ':' || generation = ANY ($1))"
        }
        Mode::MultiNode => "row.status NOT IN (1, 3) AND row.locked_by = ANY ($1)",
    }
}

/// The usual case.
pub(super) fn done(table: &TableName, mode: Mode) -> String {
    let fence = fence(mode);
    let sql = format!(
        "UPDATE {{table}} AS row SET status = 1, done_at = {{now}}, locked_by = NULL, locked_at = NULL
         WHERE row.seq = ANY ($2) AND {fence}
         RETURNING row.seq"
    );
    fill(&sql, table)
}

/// An attempt that came to an end clears its row of the suspicion that it ends processes.
pub(super) fn change(table: &TableName, mode: Mode) -> String {
    let fence = fence(mode);
    let sql = format!(
        "UPDATE {{table}} AS row SET
             status = change.status,
             attempts = row.attempts + change.counted::integer,
             available_at = coalesce({{now}} + change.wait * interval '1 microsecond', row.available_at),
             done_at = CASE WHEN change.status IN (1, 3) THEN {{now}} END,
             last_error = coalesce(change.error, row.last_error),
             locked_by = NULL,
             locked_at = NULL,
             lease_losses = CASE WHEN change.status IN (1, 3) THEN row.lease_losses ELSE 0 END
         FROM unnest($2::bigint[], $3::smallint[], $4::boolean[], $5::bigint[], $6::text[])
             AS change (seq, status, counted, wait, error)
         WHERE row.seq = ANY ($2) AND row.seq = change.seq AND {fence}
         RETURNING row.seq"
    );
    fill(&sql, table)
}

impl Outbox {
    /// Carries out what may still be carried out, and answers with those rows.
    pub(super) async fn record(&self, lane: &Lane, mut records: Records) -> Result<HashSet<i64>, StoreError> {
        if records.changes.is_empty() {
            return Ok(HashSet::new());
        }
        records.changes.sort_unstable_by_key(|change| change.seq);
        let fences: Vec<&str> = records.fences.iter().map(String::as_str).collect();
        let (table, mode) = (&self.0.table, self.0.mode);
        let all_done = records.changes.iter().all(|change| change.status == OutboxStatus::Done);
        let sql = if all_done { done(table, mode) } else { change(table, mode) };
        let mut query = sqlx::query(AssertSqlSafe(sql)).bind(fences).bind(records.column(|change| change.seq));
        if !all_done {
            query = query
                .bind(records.column(|change| change.status.code()))
                .bind(records.column(|change| change.counted))
                .bind(records.column(|change| change.wait))
                .bind(records.column(|change| change.error.clone()));
        }
        let failed = |error| store_error("settle in the outbox", error);
        let _one_at_a_time = lane.recording.lock().await;
        let rows = query.fetch_all(&self.0.pool).await.map_err(failed)?;
        rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>().map_err(failed)
    }
}
