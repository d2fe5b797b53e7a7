use std::collections::{HashMap, HashSet};
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use posthaste_core::StoreError;
use posthaste_core::outbox::{
    BlockedRows, Candidate, ClaimRequest, ClaimStore, ClaimedRow, ClaimedRows, DeadHead, MAX_CLAIM_BYTES, Mode,
    Position, Selection, select,
};
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, PgConnection, Postgres, Row};

use super::rows::{DUE_COLUMNS, Due, EVENT_COLUMNS, due, key, position};
use super::settle::{CHANGE, Locked};
use super::{OutboxStore, fill};
use crate::outbox::{SOONEST_TAKEOVER, key_of, limit};
use crate::postgres::clock::{earliest, micros, span};
use crate::postgres::errors::doing;
use crate::session::Failed;

/// Begins a transaction in which pending rows are read by their index, in its order.
///
/// Statistics are always late for a table whose rows come and go in bursts. A planner that believes that ten thousand
/// pending rows are ten collects and sorts all of them, in every claim. So sorts and scans are disabled. The planner
/// then prices an unavoidable small sort so high that it would compile every claim first, so `jit` is off too. A lease
/// that is lost in a crash of the server costs at most a second delivery, so no claim waits for the disk. The locks of
/// a host that vanishes are released after ten seconds, and not when the network reports it.
pub(in crate::postgres) const SCAN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
     SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off;
     SET LOCAL jit = off; SET LOCAL synchronous_commit = off;
     SET LOCAL idle_in_transaction_session_timeout = '10s'";

/// The event types with due rows, and how long the first row of each has been due, in microseconds. A loose index scan: one
/// seek per type, however many rows each has.
pub(super) const PENDING_TYPES: &str = "WITH RECURSIVE first AS (
         (SELECT event_type, available_at FROM {table}
          WHERE status IN (0, 2) ORDER BY event_type, available_at, seq LIMIT 1)
         UNION ALL
         SELECT next.event_type, next.available_at FROM first CROSS JOIN LATERAL (
             SELECT event_type, available_at FROM {table}
             WHERE status IN (0, 2) AND event_type > first.event_type ORDER BY event_type, available_at, seq LIMIT 1
         ) AS next
     )
     SELECT event_type, (extract(epoch FROM {now} - available_at) * 1000000)::bigint
     FROM first WHERE available_at <= {now} LIMIT 20000";

/// Reads due rows, and returns them in no order, for claims in memory. Binds: the rows to leave out, the limit, the
/// position after which to begin (time and number), the minimum age of a row in microseconds, the event type.
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

/// Leases due rows that never lost a lease, if the first due row is one of those, and returns them in no order: the
/// usual claim of multi-node mode in one statement. Binds: as [`pending`] up to the age, the lease in microseconds,
/// true if suspects are allowed, the claim id, the event type.
///
/// It returns nothing if the first due row is a suspect. Then the claim reads [`candidates`] and selects among them.
pub(super) fn lease_due(of_one_type: bool) -> String {
    let (due, order) = due_rows(of_one_type.then_some("$9"));
    format!(
        "WITH due AS MATERIALIZED (
             SELECT seq, available_at, locked_at IS NOT NULL OR lease_losses > 0 AS is_suspect,
                 coalesce(octet_length(payload), octet_length(payload_bytes)) AS bytes
             FROM {{table}}
             WHERE {due} AND {FREE} AND seq NOT IN (SELECT unnest($1::bigint[]))
             ORDER BY {order} LIMIT $2
             FOR UPDATE SKIP LOCKED
         ), measured AS (
             SELECT seq, is_suspect, first_value(is_suspect) OVER in_order AS starts_with_suspect,
                 sum(bytes) OVER in_order - bytes AS before
             FROM due WINDOW in_order AS (ORDER BY available_at, seq ROWS UNBOUNDED PRECEDING)
         )
         UPDATE {{table}} SET locked_by = $8, locked_at = {{now}}
         WHERE seq = ANY (ARRAY(
             SELECT seq FROM measured WHERE NOT starts_with_suspect AND NOT is_suspect AND before < {MAX_CLAIM_BYTES}))
         RETURNING {EVENT_COLUMNS}, {DUE_COLUMNS}"
    )
}

/// Reads and locks due rows, in order; in ordered mode, with the predecessor of each row. Binds: as [`pending`] up to
/// the age, the lease in microseconds, true if suspects are allowed, the event type.
///
/// A predecessor is read as it was when the statement began. If it was finished since then, its row waits a moment
/// longer than necessary, but no row overtakes its predecessor.
pub(super) fn candidates(mode: Mode, of_one_type: bool) -> String {
    let (due, order) = due_rows(of_one_type.then_some("$8"));
    let (unblocked, predecessor) = match mode {
        Mode::Ordered(_) => (
            "AND NOT blocked",
            "CASE WHEN aggregate_id IS NOT NULL THEN (
                 SELECT before.seq FROM {table} AS before
                 WHERE before.aggregate_type = row.aggregate_type AND before.aggregate_id = row.aggregate_id
                   AND before.{unfinished} AND before.seq < row.seq
                 ORDER BY before.aggregate_type DESC, before.aggregate_id DESC, before.seq DESC LIMIT 1) END",
        ),
        _ => ("", "NULL::bigint"),
    };
    format!(
        "SELECT seq, available_at, CASE WHEN locked_at IS NOT NULL THEN coalesce(locked_by, '') END, lease_losses,
             coalesce(octet_length(payload), octet_length(payload_bytes)), aggregate_type, aggregate_id, {predecessor}
         FROM {{table}} AS row
         WHERE {due} {unblocked} AND {FREE} AND seq NOT IN (SELECT unnest($1::bigint[]))
         ORDER BY {order} LIMIT $2
         FOR UPDATE OF row SKIP LOCKED"
    )
}

/// Leases rows that this transaction has locked, and returns them in no order. Binds: the rows, the claim id, their new
/// `lease_losses`.
pub(super) fn lease_rows() -> String {
    format!(
        "UPDATE {{table}} SET locked_by = $2, locked_at = {{now}}, lease_losses = $3 WHERE seq = ANY ($1)
         RETURNING {EVENT_COLUMNS}, {DUE_COLUMNS}"
    )
}

/// Marks a row that lost too many leases as DEAD. Binds: the row, the error, its new `lease_losses`.
fn mark_dead() -> String {
    format!(
        "UPDATE {{table}} SET status = 3, done_at = {{now}}, last_error = $2, lease_losses = $3, locked_by = NULL,
             locked_at = NULL
         WHERE seq = $1
         RETURNING {EVENT_COLUMNS}, {DUE_COLUMNS}"
    )
}

/// Blocks rows that this transaction has locked, because unfinished rows of their keys precede them. Binds: the rows.
pub(super) const BLOCK: &str = "UPDATE {table} SET blocked = true WHERE seq = ANY ($1)";

/// Those of the rows that are unfinished and that no transaction has locked, so that none is about to be finished. A
/// transaction that finishes one of them later sees the rows that it blocks. `{rows}` is a list of numbers.
///
/// It is one message to the server: the server releases the locks at its end, however long this process takes to read
/// the result. No lock of ours may stay on rows that other processes have claimed.
const UNLOCKED_UNFINISHED: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
     SET LOCAL enable_seqscan = off; SET LOCAL jit = off;
     SELECT seq FROM {table} WHERE seq = ANY ('{{rows}}'::bigint[]) AND {unfinished_by_number} FOR SHARE SKIP LOCKED;
     COMMIT";

/// Unblocks the first rows of keys, so that claims read them again. Binds: the aggregate types, the aggregate ids, how
/// many rows of each key.
///
/// [`UNLOCKED_UNFINISHED`] locks rows for a moment, so this waits for locked rows. A row that stays locked for longer
/// is left to the sweep: a settlement must not fail for a row that is not its own.
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

/// The next blocked rows, and which of them are orphans: no unfinished row of their key precedes them. Binds: the row
/// after which to begin, the limit.
pub(super) const BLOCKED_ROWS: &str = "SELECT seq, NOT EXISTS (
         SELECT 1 FROM {table} AS before
         WHERE before.aggregate_type = row.aggregate_type AND before.aggregate_id = row.aggregate_id
           AND before.{unfinished} AND before.seq < row.seq)
     FROM {table} AS row WHERE blocked AND seq > $1 ORDER BY seq LIMIT $2";

/// Binds: the rows.
const UNBLOCK_ROWS: &str = "UPDATE {table} SET blocked = false WHERE seq = ANY ($1)";

/// How long until the first row is due that is not left out, or until the first lease of another process ends. Binds:
/// the rows to leave out, true if suspects are allowed, the event type; where rows are leased, the lease in
/// microseconds.
///
/// Leases are searched for at the head of the table only, because claims start there.
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

/// The rows that no lease protects. `$6` is the lease, and `$7` is true if suspects are allowed.
///
/// A lease that began in the future was made before the clock was set back. Its end is unknown, so it counts as ended.
/// But not if it began within a tenth of its length: it may have been made since this statement began.
const FREE: &str = "(locked_at IS NULL OR locked_at <= {now} - $6 * interval '1 microsecond'
         OR locked_at > {now} + $6 / 10 * interval '1 microsecond')
     AND ($7 OR (locked_at IS NULL AND lease_losses = 0))";

/// The condition for due rows after the position `$3, $4` that are older than `$5`, and the order of the index that has
/// them.
///
/// For one event type, the condition and the order both name the type as the index does, although it is the same for
/// all of these rows. With an equality, any index could give the order, and a planner with old statistics would choose
/// the index of all types.
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

#[async_trait]
impl ClaimStore for OutboxStore {
    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, StoreError> {
        let claim = async {
            match self.mode {
                Mode::SingleNode | Mode::WriterOnly => self.read_due(request).await,
                Mode::MultiNode => self.lease_due(request).await,
                Mode::Ordered(_) => self.lease_runs(request).await,
            }
        };
        doing("claim from the outbox", claim).await
    }

    async fn next_due(&self, request: &ClaimRequest<'_>) -> Result<Option<Duration>, StoreError> {
        let next_due = async {
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
        };
        doing("claim from the outbox", next_due).await
    }

    async fn blocked_rows(&self, after: Option<Position>, batch: usize) -> Result<BlockedRows, StoreError> {
        let sweep = async {
            let mut scan = self.claims.begin(SCAN).await?;
            let after = after.map_or(i64::MIN, |after| after.seq);
            let read = sqlx::query(self.sql(BLOCKED_ROWS)).bind(after).bind(limit(batch));
            let rows = read.fetch_all(&mut *scan).await?;
            scan.commit().await?;
            let mut blocked = BlockedRows::default();
            for row in &rows {
                let seq: i64 = row.try_get(0)?;
                blocked.last = Some(Position { due: 0, seq }).filter(|_| rows.len() >= batch);
                if row.try_get(1)? {
                    blocked.orphans.push(seq);
                }
            }
            Ok(blocked)
        };
        doing("sweep the blocked rows of the outbox", sweep).await
    }

    async fn unlocked_unfinished(&self, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        let ask = async {
            let numbers: Vec<String> = rows.iter().map(i64::to_string).collect();
            let sql = fill(UNLOCKED_UNFINISHED, &self.table, self.mode).replace("{rows}", &numbers.join(","));
            let unlocked = self.claims.fetch(sqlx::raw_sql(AssertSqlSafe(sql))).await?;
            Ok(unlocked.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?)
        };
        doing("check the blocked rows of the outbox", ask).await
    }

    async fn unblock_rows(&self, rows: &[i64]) -> Result<(), StoreError> {
        let unblock = async {
            let mut work = self.claims.begin(CHANGE).await?;
            sqlx::query(self.sql(UNBLOCK_ROWS)).bind(rows).execute(&mut *work).await?;
            work.commit().await
        };
        doing("unblock rows of the outbox", unblock).await
    }

    async fn pending_types(&self) -> Result<Vec<String>, StoreError> {
        let list = async {
            let mut scan = self.claims.begin(SCAN).await?;
            let types: Vec<(String, i64)> = sqlx::query_as(self.sql(PENDING_TYPES)).fetch_all(&mut *scan).await?;
            scan.commit().await?;
            Ok(types.into_iter().map(|(event_type, _)| event_type).collect())
        };
        doing("list the pending event types of the outbox", list).await
    }
}

type Bound<'q> = Query<'q, Postgres, PgArguments>;

impl OutboxStore {
    async fn read_due(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, Failed> {
        let mut scan = self.claims.begin(SCAN).await?;
        let mut query = bind_due(sqlx::query(self.sql(&pending(request.event_type.is_some()))), request);
        if let Some(event_type) = request.event_type {
            query = query.bind(event_type);
        }
        let rows = query.fetch_all(&mut *scan).await?;
        scan.commit().await?;
        Ok(claimed_rows(&rows)?)
    }

    async fn lease_due(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, Failed> {
        let mut scan = self.claims.begin(SCAN).await?;
        let query = bind_free(sqlx::query(self.sql(&lease_due(request.event_type.is_some()))), request);
        let mut query = query.bind(request.claim_id);
        if let Some(event_type) = request.event_type {
            query = query.bind(event_type);
        }
        let rows = query.fetch_all(&mut *scan).await?;
        let mut claimed = claimed_rows(&rows)?;
        if claimed.rows.is_empty() && request.allow_suspects {
            // Nothing is due, or the first due row is a suspect.
            let candidates = self.candidates(&mut scan, request).await?;
            let selection = select(&candidates);
            claimed.last = candidates.last().map(|last| last.position).filter(|_| !selection.is_cut);
            claimed.more = selection.is_cut;
            claimed.rows = self.carry_out(&mut scan, &selection, request.claim_id).await?;
        }
        scan.commit().await?;
        Ok(claimed)
    }

    async fn lease_runs(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, Failed> {
        let mut scan = self.claims.begin(SCAN).await?;
        let candidates = self.candidates(&mut scan, request).await?;
        let selection = select(&candidates);
        let rows = self.carry_out(&mut scan, &selection, request.claim_id).await?;
        if !selection.blocked.is_empty() {
            let rows: Vec<i64> = selection.blocked.iter().map(|(row, _)| *row).collect();
            sqlx::query(self.sql(BLOCK)).bind(rows).execute(&mut *scan).await?;
        }
        scan.commit().await?;
        let is_full = candidates.len() >= request.limit;
        // A cut selection leaves candidates unclaimed, so the next claim begins where this one began.
        let last = candidates.last().map(|last| last.position).filter(|_| !selection.is_cut);
        Ok(ClaimedRows { rows, more: is_full || selection.is_cut, last, blocked: selection.blocked })
    }

    async fn candidates(
        &self,
        scan: &mut PgConnection,
        request: &ClaimRequest<'_>,
    ) -> Result<Vec<Candidate>, sqlx::Error> {
        let sql = self.sql(&candidates(self.mode, request.event_type.is_some()));
        let mut query = bind_free(sqlx::query(sql), request);
        if let Some(event_type) = request.event_type {
            query = query.bind(event_type);
        }
        let rows = query.fetch_all(scan).await?;
        let is_ordered = matches!(self.mode, Mode::Ordered(_));
        let read = |row: &PgRow| {
            Ok(Candidate {
                position: position(row.try_get(1)?, row.try_get(0)?),
                ended_lease: row.try_get(2)?,
                lease_losses: row.try_get::<i16, _>(3)?.max(0) as u32,
                bytes: row.try_get::<i32, _>(4)?.max(0) as usize,
                key: if is_ordered { key_of(row.try_get(5)?, row.try_get(6)?) } else { None },
                predecessor: row.try_get(7)?,
            })
        };
        rows.iter().map(read).collect()
    }

    /// Leases the selected rows, or marks the selected row as DEAD. Returns the rows in the order of the selection.
    async fn carry_out(
        &self,
        scan: &mut PgConnection,
        selection: &Selection,
        claim_id: &str,
    ) -> Result<Vec<ClaimedRow>, sqlx::Error> {
        let losses = i16::try_from(selection.losses).unwrap_or(i16::MAX);
        if let Some((dead, error)) = &selection.dead {
            let mark = sqlx::query(self.sql(&mark_dead())).bind(dead).bind(error).bind(losses);
            let rows = mark.fetch_all(&mut *scan).await?;
            if self.mode == Mode::Ordered(DeadHead::Skip) {
                let keys = rows.iter().map(|row| Ok((row.try_get(2)?, row.try_get(3)?)));
                self.unblock(scan, keys.collect::<Result<_, sqlx::Error>>()?, Locked::Skip).await?;
            }
            return rows.iter().map(|row| due(row).map(|due| due.row)).collect();
        }
        if selection.claimed.is_empty() {
            return Ok(Vec::new());
        }
        let lease = sqlx::query(self.sql(&lease_rows())).bind(&selection.claimed).bind(claim_id).bind(losses);
        let mut by_seq = HashMap::with_capacity(selection.claimed.len());
        for row in &lease.fetch_all(scan).await? {
            let mut claimed = due(row)?.row;
            if matches!(self.mode, Mode::Ordered(_)) {
                claimed.key = key(row)?;
            }
            by_seq.insert(claimed.position.seq, claimed);
        }
        Ok(selection.claimed.iter().filter_map(|seq| by_seq.remove(seq)).collect())
    }
}

/// The rows in the order of delivery.
fn claimed_rows(rows: &[PgRow]) -> Result<ClaimedRows, sqlx::Error> {
    let mut rows = rows.iter().map(due).collect::<Result<Vec<Due>, _>>()?;
    rows.sort_unstable_by_key(|due| due.row.position);
    let bytes: usize = rows.iter().map(|due| due.payload_bytes).sum();
    Ok(ClaimedRows {
        more: bytes >= MAX_CLAIM_BYTES,
        last: rows.last().map(|due| due.row.position),
        rows: rows.into_iter().map(|due| due.row).collect(),
        blocked: Vec::new(),
    })
}

/// The binds `$1` to `$5`: see [`pending`].
fn bind_due<'q>(query: Bound<'q>, request: &ClaimRequest<'q>) -> Bound<'q> {
    let (time, seq) = match request.after {
        Some(Position { due, seq }) => (DateTime::from_timestamp_micros(due).unwrap_or_else(earliest), seq),
        None => (earliest(), i64::MIN),
    };
    let query = query.bind(request.in_flight).bind(limit(request.limit)).bind::<DateTime<Utc>>(time).bind(seq);
    query.bind(micros(request.skip_recent))
}

/// The binds `$1` to `$7`: see [`lease_due`].
fn bind_free<'q>(query: Bound<'q>, request: &ClaimRequest<'q>) -> Bound<'q> {
    bind_due(query, request).bind(micros(request.lease)).bind(request.allow_suspects)
}
