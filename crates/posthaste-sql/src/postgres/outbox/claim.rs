use std::collections::{HashMap, HashSet};
use std::time::Duration;

use chrono::{DateTime, Utc};
use posthaste_core::outbox::{
    Selection, DEAD_AFTER_LOSSES, DeadHead, MAX_CLAIM_BYTES, Candidate, Mode, ClaimedRow, Position, STARTED, SUSPECT_GROUP, ClaimedRows,
    ClaimRequest, select_runs,
};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Row};

use super::rows::{DUE_COLUMNS, Due, EVENT_COLUMNS, due, key, position};
use super::settle::{CHANGE, Locked};
use super::{OutboxStore, fill};
use crate::outbox::{SOONEST_TAKEOVER, SWEEP_BATCH, key_of};
use crate::postgres::clock::{earliest, micros, span};
use crate::session::Failed;

/// How many leases a free row has lost, with the one that is taken over now. After the first, only a lease under which its
/// delivery had started counts.
fn losses() -> String {
    format!(
        "lease_losses + (locked_at IS NOT NULL AND (lease_losses = 0 OR right(locked_by, {}) = '{STARTED}'))::integer",
        STARTED.len()
    )
}

/// Begins a transaction in which pending rows are read by their index, in its order.
///
/// Statistics are always late for a table whose rows come and go in bursts: a planner that takes ten thousand pending
/// rows for ten collects and sorts them all, in every claim. It is forbidden to; a small sort that has to be is then
/// priced so high that, but for `jit`, every claim would be compiled first. A lease that a crash of the server forgets
/// costs a second delivery at most, so nobody waits for its way to the disk. What a host that vanishes has locked is free
/// after ten seconds, and not when the network finds out.
pub(super) const SCAN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
     SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off;
     SET LOCAL jit = off; SET LOCAL synchronous_commit = off;
     SET LOCAL idle_in_transaction_session_timeout = '10s'";

/// A loose index scan: one seek per type, however many rows each has.
pub(super) const PENDING_TYPES: &str = "WITH RECURSIVE first AS (
         (SELECT event_type, available_at FROM {table}
          WHERE status IN (0, 2) ORDER BY event_type, available_at, seq LIMIT 1)
         UNION ALL
         SELECT next.event_type, next.available_at FROM first CROSS JOIN LATERAL (
             SELECT event_type, available_at FROM {table}
             WHERE status IN (0, 2) AND event_type > first.event_type ORDER BY event_type, available_at, seq LIMIT 1
         ) AS next
     )
     SELECT event_type FROM first WHERE available_at <= {now}";

/// Reads what is due, and answers in no order, for claims in memory. Binds: the rows to leave out, the limit, the position
/// behind which to begin (time and number), how old a row must be in microseconds, the event type.
///
/// `NOT IN (SELECT …)` looks each row up in a hash; `<> ALL` would compare it with every row that is left out.
pub(super) fn pending(of_one_type: bool) -> String {
    let (due, order) = due_rows(of_one_type.then_some("$6"));
    format!(
        "SELECT * FROM (
             SELECT *, sum(bytes) OVER (ORDER BY {order} ROWS UNBOUNDED PRECEDING) - bytes AS before
             FROM (SELECT {EVENT_COLUMNS}, {DUE_COLUMNS} FROM {{table}}
                   WHERE {due} AND seq NOT IN (SELECT unnest($1::bigint[]))
                   ORDER BY {order} LIMIT $2) AS due
         ) AS measured
         WHERE before < {MAX_CLAIM_BYTES}"
    )
}

/// LeaseSet what is due, and answers in no order. Binds: as [`pending`] up to the age, the lease in microseconds, whether a
/// suspect may be claimed, the lock, the event type.
///
/// A suspect is a row of which a lease was lost before or is lost now. When the first row in the order is one, only suspects
/// are claimed: those that lost one lease in a group, any other alone. One that lost too many goes dead instead and is
/// answered as such.
pub(super) fn lease(of_one_type: bool) -> String {
    let (due, order) = due_rows(of_one_type.then_some("$9"));
    format!(
        "WITH due AS MATERIALIZED (
             SELECT seq, available_at, {losses} AS losses,
                 coalesce(octet_length(payload), octet_length(payload_bytes)) AS bytes
             FROM {{table}}
             WHERE {due} AND {FREE} AND seq NOT IN (SELECT unnest($1::bigint[]))
             ORDER BY {order} LIMIT $2
             FOR UPDATE SKIP LOCKED
         ), measured AS (
             SELECT seq, losses, first_value(losses) OVER in_order AS first_losses,
                 row_number() OVER in_order AS place, sum(bytes) OVER in_order - bytes AS before,
                 count(*) FILTER (WHERE losses = 1) OVER in_order AS place_in_group
             FROM due WINDOW in_order AS (ORDER BY available_at, seq ROWS UNBOUNDED PRECEDING)
         )
         UPDATE {{table}} SET {lease}
         WHERE seq = ANY (ARRAY(
             SELECT seq FROM measured
             WHERE CASE
                 WHEN first_losses = 0 THEN losses = 0 AND before < {MAX_CLAIM_BYTES}
                 WHEN first_losses = 1
                     THEN losses = 1 AND place_in_group <= {SUSPECT_GROUP} AND before < {MAX_CLAIM_BYTES}
                 ELSE place = 1 END))
         RETURNING {EVENT_COLUMNS}, {DUE_COLUMNS}",
        losses = losses(),
        lease = leased("$8")
    )
}

/// Meets what is due, in order and with what each row has to wait for. Binds: as [`lease`] up to the suspects.
///
/// Who stands before a row is read as it was when the statement began: a row that has been finished since is waited for
/// a moment longer, and none is passed.
pub(super) fn meet() -> String {
    let (due, order) = due_rows(None);
    format!(
        "SELECT seq, available_at, {losses},
             coalesce(octet_length(payload), octet_length(payload_bytes)), aggregate_type, aggregate_id,
             CASE WHEN aggregate_id IS NOT NULL THEN (
                 SELECT before.seq FROM {{table}} AS before
                 WHERE before.aggregate_type = row.aggregate_type AND before.aggregate_id = row.aggregate_id
                   AND before.{{unfinished}} AND before.seq < row.seq
                 ORDER BY before.aggregate_type DESC, before.aggregate_id DESC, before.seq DESC LIMIT 1) END
         FROM {{table}} AS row
         WHERE {due} AND NOT blocked AND {FREE} AND seq NOT IN (SELECT unnest($1::bigint[]))
         ORDER BY {order} LIMIT $2
         FOR UPDATE OF row SKIP LOCKED",
        losses = losses()
    )
}

/// LeaseSet rows that were met, and answers in no order. Binds: the rows, the lock.
pub(super) fn lease_met() -> String {
    format!("UPDATE {{table}} SET {} WHERE seq = ANY ($1) RETURNING {EVENT_COLUMNS}, {DUE_COLUMNS}", leased("$2"))
}

/// Blocks rows that were met, behind others that are unfinished. Binds: the rows.
pub(super) const BLOCK: &str = "UPDATE {table} SET blocked = true WHERE seq = ANY ($1)";

/// Which of these rows are unfinished and not about to be finished: nobody has locked them. Whoever finishes one of them
/// later sees what is blocked behind it by now. `{rows}` is a list of numbers.
///
/// One message for all of it: the locks are gone when the server has carried it out, however long this process takes to
/// read the answer. No lock of ours may stand on rows that others have claimed.
const PREDECESSORS: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
     SET LOCAL enable_seqscan = off; SET LOCAL jit = off;
     SELECT seq FROM {table} WHERE seq = ANY ('{{rows}}'::bigint[]) AND {standing} FOR SHARE SKIP LOCKED;
     COMMIT";

/// Unblocks the first rows of keys, so that they are met again. Binds: the aggregate types, the aggregate ids, how many.
///
/// Whoever checks whether a row is unfinished has it locked for a moment, so rows that are locked are waited for. Only what
/// somebody has for longer is left to the sweep: a settlement must not fail for a row that is not its own.
pub(super) fn unblock(locked: Locked) -> String {
    const BLOCKED: &str = "ARRAY(
         SELECT next.seq
         FROM unnest($1::text[], $2::text[]) AS key (aggregate_type, aggregate_id)
         CROSS JOIN LATERAL (
             SELECT seq, blocked FROM {table} AS row
             WHERE row.aggregate_type = key.aggregate_type AND row.aggregate_id = key.aggregate_id AND row.{unfinished}
             ORDER BY row.aggregate_type, row.aggregate_id, row.seq LIMIT $3) AS next
         WHERE next.blocked)";
    match locked {
        Locked::Wait => format!("UPDATE {{table}} SET blocked = false WHERE seq = ANY ({BLOCKED})"),
        Locked::Skip => format!(
            "UPDATE {{table}} SET blocked = false
             WHERE seq = ANY (ARRAY(SELECT seq FROM {{table}} WHERE seq = ANY ({BLOCKED}) FOR UPDATE SKIP LOCKED))"
        ),
    }
}

/// Which of the next blocked rows wait for nobody. Binds: the row behind which to begin, the limit.
pub(super) const ORPHANED: &str = "SELECT seq, NOT EXISTS (
         SELECT 1 FROM {table} AS before
         WHERE before.aggregate_type = row.aggregate_type AND before.aggregate_id = row.aggregate_id
           AND before.{unfinished} AND before.seq < row.seq)
     FROM {table} AS row WHERE blocked AND seq > $1 ORDER BY seq LIMIT $2";

/// Binds: the rows.
const UNBLOCK_ROWS: &str = "UPDATE {table} SET blocked = false WHERE seq = ANY ($1)";

/// How long until the first row is due that is not left out, or until the first lease ends of another process. Binds: the
/// rows to leave out, whether a suspect may be claimed, the event type; where rows are leased, the lease in microseconds.
///
/// LeaseSet are looked for at the head only, because claims take rows from there.
pub(super) fn next_due(mode: Mode, of_one_type: bool) -> String {
    let (of_type, order) = match of_one_type {
        true => ("AND event_type >= $3 AND event_type <= $3", "event_type, available_at, seq"),
        false => ("", "available_at, seq"),
    };
    let lease = if of_one_type { "$4" } else { "$3" };
    let (ready, free) = match mode {
        Mode::SingleNode | Mode::WriterOnly => ("", ""),
        Mode::MultiNode => ("", "AND locked_at IS NULL"),
        Mode::Ordered(_) => ("AND NOT blocked", "AND locked_at IS NULL"),
    };
    let first = format!(
        "SELECT (extract(epoch FROM available_at - {{now}}) * 1000000)::bigint FROM {{table}}
         WHERE status IN (0, 2) {of_type} {ready} {free} AND ($2 OR lease_losses = 0)
           AND seq NOT IN (SELECT unnest($1::bigint[]))
         ORDER BY {order} LIMIT 1"
    );
    if !mode.leases_rows() {
        return first;
    }
    format!(
        "SELECT least(({first}), (
             SELECT CASE WHEN min(locked_at) IS NOT NULL THEN
                 greatest({SOONEST_TAKEOVER}, (extract(epoch FROM min(locked_at) - {{now}}) * 1000000)::bigint + {lease}) END
             FROM (SELECT locked_at FROM {{table}}
                   WHERE status IN (0, 2) {of_type} {ready} AND available_at <= {{now}}
                     AND seq NOT IN (SELECT unnest($1::bigint[]))
                   ORDER BY {order} LIMIT 1000) AS head
             WHERE $2 AND locked_at IS NOT NULL))"
    )
}

/// What no lease keeps from being claimed, with the lease in `$6`, and `$7` telling whether suspects may be.
///
/// A lease that began in the future was taken before the clock was set back: nobody can tell when it ends, so it has ended.
/// But not if it began within a tenth of its length: it may have been taken since this statement began.
const FREE: &str = "(locked_at IS NULL OR locked_at <= {now} - $6 * interval '1 microsecond'
         OR locked_at > {now} + $6 / 10 * interval '1 microsecond')
     AND ($7 OR (locked_at IS NULL AND lease_losses = 0))";

/// What is due behind the position `$3, $4` and older than `$5`, and its order in the index that has it.
///
/// For one event type both name the type as the index does, though that is the same for all rows: an equality would
/// leave the order to any index, and a planner with old statistics takes the one that holds every type.
fn due_rows(event_type: Option<&str>) -> (String, &'static str) {
    const OLD_ENOUGH: &str = "created_at <= {now} - $5 * interval '1 microsecond'";
    match event_type {
        None => (
            format!("status IN (0, 2) AND available_at <= {{now}} AND (available_at, seq) > ($3, $4) AND {OLD_ENOUGH}"),
            "available_at, seq",
        ),
        Some(bind) => (
            format!(
                "status IN (0, 2) AND (event_type, available_at) <= ({bind}, {{now}})
                 AND (event_type, available_at, seq) > ({bind}, $3, $4) AND {OLD_ENOUGH}"
            ),
            "event_type, available_at, seq",
        ),
    }
}

/// What a lease changes in a row.
fn leased(claim_id: &str) -> String {
    let losses = losses();
    let lost = format!("locked_at IS NOT NULL AND {losses} >= {DEAD_AFTER_LOSSES}");
    format!(
        "lease_losses = {losses},
         status = CASE WHEN {lost} THEN 3 ELSE status END,
         done_at = CASE WHEN {lost} THEN {{now}} END,
         last_error = CASE WHEN {lost} THEN 'lease_lost: ' || {losses} || ' processes that claimed it did not settle it' ELSE last_error END,
         locked_by = CASE WHEN {lost} THEN NULL ELSE {claim_id} END,
         locked_at = CASE WHEN {lost} THEN NULL ELSE {{now}} END"
    )
}

impl OutboxStore {
    pub(super) async fn read_due(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, Failed> {
        let mut scan = self.claims.begin(SCAN).await?;
        let sql = self.sql(&pending(request.event_type.is_some()));
        let (time, seq) = bound(request.after);
        let query = sqlx::query(sql).bind(request.in_flight).bind(limit(request.limit)).bind(time).bind(seq);
        let mut query = query.bind(micros(request.skip_recent));
        if let Some(event_type) = request.event_type {
            query = query.bind(event_type);
        }
        let rows = query.fetch_all(&mut *scan).await?;
        scan.commit().await?;
        Ok(taken(&rows)?)
    }

    pub(super) async fn lease_due(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, Failed> {
        let mut scan = self.claims.begin(SCAN).await?;
        let sql = self.sql(&lease(request.event_type.is_some()));
        let (time, seq) = bound(request.after);
        let query = sqlx::query(sql).bind(request.in_flight).bind(limit(request.limit)).bind(time).bind(seq);
        let query = query.bind(micros(request.skip_recent)).bind(micros(request.lease)).bind(request.allow_suspects);
        let mut query = query.bind(request.claim_id);
        if let Some(event_type) = request.event_type {
            query = query.bind(event_type);
        }
        let rows = query.fetch_all(&mut *scan).await?;
        scan.commit().await?;
        Ok(taken(&rows)?)
    }

    pub(super) async fn lease_runs(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, Failed> {
        self.sweep_blocked().await?;
        let mut scan = self.claims.begin(SCAN).await?;
        let met = self.meet(&mut scan, request).await?;
        let Selection { taken: chosen, blocked, is_cut } = select_runs(&met);
        let rows = match chosen.is_empty() {
            true => Vec::new(),
            false => self.lease_chosen(&mut scan, &chosen, request.claim_id).await?,
        };
        if !blocked.is_empty() {
            let rows: Vec<i64> = blocked.iter().map(|(row, _)| *row).collect();
            sqlx::query(self.sql(BLOCK)).bind(rows).execute(&mut *scan).await?;
        }
        scan.commit().await?;
        let is_full = met.len() >= request.limit;
        // What was cut off stands among what was met: the next claim begins where this one did.
        let last = met.last().map(|met| met.position).filter(|_| !is_cut);
        // What is leased is ours, whatever becomes of this.
        let is_held_up = self.check_blocked(&blocked).await.unwrap_or_else(|failed| {
            tracing::warn!(table = %self.table, ?failed, "blocked rows are not checked: the next sweep finds those that wait for nobody");
            false
        });
        Ok(ClaimedRows { rows, more: is_full || is_cut, last, is_held_up })
    }

    /// A row may have been finished while others were blocked behind it, and nobody would unblock those. Runs after they are
    /// blocked for everybody to see, and unblocks those whose predecessor is finished or about to be; true if there are any.
    async fn check_blocked(&self, blocked: &[(i64, i64)]) -> Result<bool, Failed> {
        if blocked.is_empty() {
            return Ok(false);
        }
        let predecessors: HashSet<i64> = blocked.iter().map(|(_, predecessor)| *predecessor).collect();
        let numbers: Vec<String> = predecessors.iter().map(i64::to_string).collect();
        let sql = fill(PREDECESSORS, &self.table, self.mode).replace("{rows}", &numbers.join(","));
        let waiting = self.claims.fetch(sqlx::raw_sql(AssertSqlSafe(sql))).await?;
        let waiting = waiting.iter().map(|row| row.try_get(0)).collect::<Result<HashSet<i64>, _>>()?;
        let free = blocked.iter().filter(|(_, predecessor)| !waiting.contains(predecessor));
        let free: Vec<i64> = free.map(|(row, _)| *row).collect();
        self.unblock_rows(&free).await?;
        Ok(!free.is_empty())
    }

    async fn unblock_rows(&self, rows: &[i64]) -> Result<(), Failed> {
        if rows.is_empty() {
            return Ok(());
        }
        let mut work = self.claims.begin(CHANGE).await?;
        sqlx::query(self.sql(UNBLOCK_ROWS)).bind(rows).execute(&mut *work).await?;
        work.commit().await
    }

    /// Looks at some of what is blocked, for rows that wait for nobody.
    async fn sweep_blocked(&self) -> Result<(), Failed> {
        let Some(after) = self.sweeper.next() else { return Ok(()) };
        let mut scan = self.claims.begin(SCAN).await?;
        let look = sqlx::query(self.sql(ORPHANED)).bind(after.seq).bind(limit(SWEEP_BATCH));
        let rows = look.fetch_all(&mut *scan).await?;
        scan.commit().await?;
        let (mut last, mut orphaned) = (None, Vec::new());
        for row in &rows {
            let seq: i64 = row.try_get(0)?;
            last = Some(Position { due: 0, seq });
            if row.try_get(1)? {
                orphaned.push(seq);
            }
        }
        self.unblock_rows(&orphaned).await?;
        self.sweeper.looked(rows.len(), last);
        Ok(())
    }

    async fn meet(&self, scan: &mut PgConnection, request: &ClaimRequest<'_>) -> Result<Vec<Candidate>, sqlx::Error> {
        let (time, seq) = bound(request.after);
        let query = sqlx::query(self.sql(&meet())).bind(request.in_flight).bind(limit(request.limit)).bind(time).bind(seq);
        let query = query.bind(micros(request.skip_recent)).bind(micros(request.lease)).bind(request.allow_suspects);
        let rows = query.fetch_all(scan).await?;
        let read = |row: &PgRow| {
            Ok(Candidate {
                position: position(row.try_get(1)?, row.try_get(0)?),
                losses: row.try_get::<i32, _>(2)?.max(0) as u32,
                bytes: row.try_get::<i32, _>(3)?.max(0) as usize,
                key: key_of(row.try_get(4)?, row.try_get(5)?),
                predecessor: row.try_get(6)?,
            })
        };
        rows.iter().map(read).collect()
    }

    /// Answers in the order in which the rows were chosen.
    async fn lease_chosen(
        &self,
        scan: &mut PgConnection,
        chosen: &[i64],
        claim_id: &str,
    ) -> Result<Vec<ClaimedRow>, sqlx::Error> {
        let rows = sqlx::query(self.sql(&lease_met())).bind(chosen).bind(claim_id).fetch_all(&mut *scan).await?;
        let (mut by_seq, mut passed) = (HashMap::with_capacity(rows.len()), Vec::new());
        for row in &rows {
            let Due { mut pending, .. } = due(row)?;
            pending.key = key(row)?;
            if pending.is_dead && self.mode == Mode::Ordered(DeadHead::Skip) {
                passed.push((row.try_get(2)?, row.try_get(3)?));
            }
            by_seq.insert(pending.position.seq, pending);
        }
        self.unblock(scan, passed, Locked::Skip).await?;
        Ok(chosen.iter().filter_map(|seq| by_seq.remove(seq)).collect())
    }

    pub(super) async fn first_due(&self, request: &ClaimRequest<'_>) -> Result<Option<Duration>, Failed> {
        let mut scan = self.claims.begin(SCAN).await?;
        let sql = self.sql(&next_due(self.mode, request.event_type.is_some()));
        let mut query = sqlx::query(sql).bind(request.in_flight).bind(request.allow_suspects);
        if let Some(event_type) = request.event_type {
            query = query.bind(event_type);
        }
        if self.mode.leases_rows() {
            query = query.bind(micros(request.lease));
        }
        let row = query.fetch_optional(&mut *scan).await?;
        scan.commit().await?;
        let wait: Option<i64> = row.map(|row| row.try_get(0)).transpose()?.flatten();
        Ok(wait.map(span))
    }

    pub(super) async fn due_types(&self) -> Result<Vec<String>, Failed> {
        let mut scan = self.claims.begin(SCAN).await?;
        let types = sqlx::query_scalar(self.sql(PENDING_TYPES)).fetch_all(&mut *scan).await?;
        scan.commit().await?;
        Ok(types)
    }
}

/// In the order of delivery.
fn taken(rows: &[PgRow]) -> Result<ClaimedRows, sqlx::Error> {
    let mut rows = rows.iter().map(due).collect::<Result<Vec<Due>, _>>()?;
    rows.sort_unstable_by_key(|row| row.pending.position);
    let bytes: usize = rows.iter().map(|row| row.payload_bytes).sum();
    Ok(ClaimedRows {
        more: bytes >= MAX_CLAIM_BYTES,
        last: rows.last().map(|row| row.pending.position),
        rows: rows.into_iter().map(|row| row.pending).collect(),
        is_held_up: false,
    })
}

/// The position behind which to begin, as binds.
fn bound(after: Option<Position>) -> (DateTime<Utc>, i64) {
    match after {
        Some(Position { due, seq }) => (DateTime::from_timestamp_micros(due).unwrap_or_else(earliest), seq),
        None => (earliest(), i64::MIN),
    }
}

fn limit(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}
