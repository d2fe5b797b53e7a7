use std::collections::{HashMap, HashSet};
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, NaiveDateTime};
use posthaste_core::StoreError;
use posthaste_core::outbox::{
    BlockedRows, Candidate, ClaimRequest, ClaimStore, ClaimedRow, ClaimedRows, DeadHead, MAX_LISTED_TYPES, Mode,
    Position, Selection, select,
};
use sqlx::mysql::{MySqlArguments, MySqlRow};
use sqlx::query::Query;
use sqlx::{MySql, MySqlConnection, Row};

use super::rows::{BYTES, DUE_COLUMNS, EVENT_COLUMNS, due, key, position};
use super::{BEGIN_OWN, OutboxStore, list};
use crate::mysql::clock::{earliest, micros, span};
use crate::mysql::errors::doing;
use crate::outbox::{SOONEST_TAKEOVER, key_of, limit};
use crate::session::Failed;

/// The claim id of a lease that has ended, of a row that is free.
const ENDED_LEASE: &str = "CASE WHEN locked_at IS NOT NULL THEN COALESCE(locked_by, '') END";

/// How many types one statement lists: the server limits the depth of a recursion.
const TYPES: i64 = 500;

/// The event types with pending rows, and how long the first row of each has been due, in microseconds; NULL if it is
/// not due. A loose index scan: one seek per type, however many rows each has. Binds: the type after which to begin,
/// how many.
pub(super) const PENDING_TYPES: &str = "WITH RECURSIVE found (event_type, place) AS (
         (SELECT event_type, 1 FROM {table} FORCE INDEX ({table}_pending_of_type)
          WHERE pending = 1 AND event_type > ? ORDER BY event_type LIMIT 1)
         UNION ALL
         SELECT (SELECT later.event_type FROM {table} AS later FORCE INDEX ({table}_pending_of_type)
                 WHERE later.pending = 1 AND later.event_type > found.event_type ORDER BY later.event_type LIMIT 1),
             found.place + 1
         FROM found WHERE found.event_type IS NOT NULL AND found.place < ?
     )
     SELECT found.event_type, (
         SELECT TIMESTAMPDIFF(MICROSECOND, due.available_at, {now}) FROM {table} AS due FORCE INDEX ({table}_pending_of_type)
         WHERE due.pending = 1 AND due.event_type = found.event_type AND due.available_at <= {now}
         ORDER BY due.available_at LIMIT 1)
     FROM found WHERE found.event_type IS NOT NULL";

/// Finds due rows, in order, for claims in memory. Binds: the event type, the position after which to begin (time
/// twice, and number), the minimum age of a row in microseconds, the limit.
pub(super) fn pending(of_one_type: bool) -> String {
    let due = due_rows(Mode::SingleNode, of_one_type);
    format!("SELECT seq, available_at, NULL, 0, {BYTES} {due} ORDER BY available_at, seq LIMIT ?")
}

/// Finds and locks due rows that are free, in order. Binds: as [`pending`] up to the age, then those of [`FREE`], the
/// limit.
///
/// It waits for no row, and a lease changes no column of the index by which it locks: no deadlock is possible.
pub(super) fn free(of_one_type: bool) -> String {
    let due = due_rows(Mode::MultiNode, of_one_type);
    format!(
        "SELECT seq, available_at, {ENDED_LEASE}, lease_losses, {BYTES} {due} AND {FREE}
         ORDER BY available_at, seq LIMIT ? FOR UPDATE SKIP LOCKED"
    )
}

/// Finds due rows that are free and not blocked, in order, and locks nothing: blocking a row changes the index by which
/// it is found. Binds: as [`free`].
pub(super) fn ready(of_one_type: bool) -> String {
    let due = due_rows(Mode::ORDERED, of_one_type);
    format!("SELECT seq {due} AND {FREE} ORDER BY available_at, seq LIMIT ?")
}

/// Locks those of the rows that are still due, free and not blocked. Binds: the rows, then those of [`FREE`].
pub(super) fn lock_ready() -> String {
    format!(
        "SELECT seq, available_at, {ENDED_LEASE}, lease_losses, {BYTES}, aggregate_type, aggregate_id
         FROM {{rows}} WHERE ready = 1 AND available_at <= {{now}} AND {FREE} FOR UPDATE SKIP LOCKED"
    )
}

/// The predecessor of each of the rows: the row that it has to wait for. Binds: the rows.
///
/// It is a separate statement after the rows are locked, so that it sees every row that was committed together with
/// them, however late that was. If a predecessor was finished since then, its row waits a moment longer than necessary,
/// but no row overtakes its predecessor.
pub(super) const PREDECESSORS: &str = "SELECT seq, (
         SELECT earlier.seq FROM {table} AS earlier FORCE INDEX ({table}_key)
         WHERE earlier.unfinished = 1 AND earlier.aggregate_type = {table}.aggregate_type
           AND earlier.aggregate_id = {table}.aggregate_id AND earlier.seq < {table}.seq AND earlier.{unfinished}
         ORDER BY earlier.seq DESC LIMIT 1)
     FROM {rows}";

/// Reads rows that are claimed. Binds: the rows.
pub(super) fn read() -> String {
    format!("SELECT {EVENT_COLUMNS}, {DUE_COLUMNS} FROM {{rows}}")
}

/// Leases rows that this transaction has locked. Binds: the rows, the claim id, their new `lease_losses`.
pub(super) const LEASE: &str = "UPDATE {rows} SET locked_by = ?, locked_at = {now}, lease_losses = ?";

/// Marks a row that lost too many leases as DEAD. Binds: the error, its new `lease_losses`, the row.
const MARK_DEAD: &str =
    "UPDATE {table} SET status = 3, done_at = {now}, last_error = ?, lease_losses = ?, locked_by = NULL,
         locked_at = NULL
     WHERE seq = ?";

/// Blocks rows that this transaction has locked, because unfinished rows of their keys precede them. Binds: the rows.
pub(super) const BLOCK: &str = "UPDATE {rows} SET blocked = 1";

/// Those of the rows that are unfinished and that no transaction has locked, so that none is about to be finished. A
/// transaction that finishes one of them later sees the rows that it blocks. Binds: the rows.
///
/// It runs outside of a transaction: the server releases its locks at its end. No lock of ours may stay on rows that
/// other processes have claimed.
pub(super) const UNLOCKED_UNFINISHED: &str = "SELECT seq FROM {rows} WHERE {unfinished} FOR UPDATE SKIP LOCKED";

/// The blocked rows after rows that are finished now, among the first rows of their keys. Binds: the rows, one less
/// than the number of rows of each key.
pub(super) const BLOCKED: &str = "SELECT next.seq FROM {rows}
     STRAIGHT_JOIN {table} AS next FORCE INDEX ({table}_key)
         ON next.unfinished = 1 AND next.aggregate_type = {table}.aggregate_type
        AND next.aggregate_id = {table}.aggregate_id AND next.seq <= COALESCE((
             SELECT until.seq FROM {table} AS until FORCE INDEX ({table}_key)
             WHERE until.unfinished = 1 AND until.aggregate_type = {table}.aggregate_type
               AND until.aggregate_id = {table}.aggregate_id AND until.{unfinished}
             ORDER BY until.seq LIMIT 1 OFFSET ?), 9223372036854775807)
     WHERE next.blocked = 1";

/// Locks those of the rows that are blocked and that no other transaction has locked. Binds: the rows.
pub(super) const LOCK_BLOCKED: &str = "SELECT seq FROM {rows} WHERE blocked = 1 FOR UPDATE SKIP LOCKED";

/// Unblocks rows, so that claims read them again. Binds: the rows.
pub(super) const UNBLOCK: &str = "UPDATE {rows} SET blocked = 0";

/// The next blocked rows, and which of them are orphans: no unfinished row of their key precedes them. Binds: the time,
/// twice, and the number of the row after which to begin, the limit.
pub(super) const BLOCKED_ROWS: &str = "SELECT blocked.seq, blocked.available_at, NOT EXISTS (
         SELECT 1 FROM {table} AS earlier FORCE INDEX ({table}_key)
         WHERE earlier.unfinished = 1 AND earlier.aggregate_type = blocked.aggregate_type
           AND earlier.aggregate_id = blocked.aggregate_id AND earlier.seq < blocked.seq AND earlier.{unfinished})
     FROM {table} AS blocked FORCE INDEX ({table}_ready)
     WHERE blocked.ready = 0 AND blocked.available_at >= ? AND (blocked.available_at > ? OR blocked.seq > ?)
     ORDER BY blocked.available_at, blocked.seq LIMIT ?";

/// How long until the first rows are due. Binds: where rows are leased, true if suspects are allowed; the event type;
/// the limit.
pub(super) fn next_due(mode: Mode, of_one_type: bool) -> String {
    let (index, which) = index(mode, of_one_type);
    let free = match mode.leases_rows() {
        true => "(? OR lease_losses = 0) AND locked_at IS NULL AND ",
        false => "",
    };
    format!(
        "SELECT seq, TIMESTAMPDIFF(MICROSECOND, {{now}}, available_at) FROM {{table}} FORCE INDEX ({{table}}_{index})
         WHERE {free}{which} ORDER BY available_at, seq LIMIT ?"
    )
}

/// How long until the first lease of another process ends. Binds: the lease in microseconds, the event type, the rows
/// to leave out.
///
/// Leases are searched for at the head of the table only, because claims start there.
pub(super) fn next_lease_end(mode: Mode, of_one_type: bool) -> String {
    let (index, which) = index(mode, of_one_type);
    format!(
        "SELECT GREATEST({SOONEST_TAKEOVER}, TIMESTAMPDIFF(MICROSECOND, {{now}}, MIN(locked_at)) + ?)
         FROM (SELECT seq, locked_at FROM {{table}} FORCE INDEX ({{table}}_{index})
               WHERE {which} AND available_at <= {{now}} ORDER BY available_at, seq LIMIT 1000) AS head
         WHERE locked_at IS NOT NULL AND NOT FIND_IN_SET(seq, ?)"
    )
}

/// The rows that no lease protects. Binds: the lease in microseconds, a tenth of it, the rows to leave out, true if
/// suspects are allowed.
///
/// A lease that began in the future was made before the clock was set back. Its end is unknown, so it counts as ended.
///
/// The rows that this process has in flight are usually leased. So only rows whose lease has ended are looked up in the
/// list of rows to leave out, which may be long.
const FREE: &str = "(locked_at IS NULL
         OR ((locked_at <= {now} - INTERVAL ? MICROSECOND OR locked_at > {now} + INTERVAL ? MICROSECOND)
             AND NOT FIND_IN_SET(seq, ?)))
     AND (? OR (locked_at IS NULL AND lease_losses = 0))";

/// The due rows after a position that are old enough, read by the index that has them in order. The index is forced,
/// because statistics are always late for a table whose rows come and go in bursts.
fn due_rows(mode: Mode, of_one_type: bool) -> String {
    let (index, which) = index(mode, of_one_type);
    format!(
        "FROM {{table}} FORCE INDEX ({{table}}_{index})
         WHERE {which} AND available_at <= {{now}} AND available_at >= ? AND (available_at > ? OR seq > ?)
           AND created_at <= {{now}} - INTERVAL ? MICROSECOND"
    )
}

/// The index that a claim reads, and the condition on its columns before the time.
fn index(mode: Mode, of_one_type: bool) -> (&'static str, &'static str) {
    match (mode, of_one_type) {
        (Mode::Ordered(_), false) => ("ready", "ready = 1"),
        (Mode::Ordered(_), true) => ("ready", "ready = 1 AND event_type = ?"),
        (_, false) => ("pending", "pending = 1"),
        (_, true) => ("pending_of_type", "pending = 1 AND event_type = ?"),
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
            let mut scan = self.claims.begin(BEGIN_OWN).await?;
            let mut first = self.first_due(&mut scan, request).await?;
            if self.mode.leases_rows() && request.allow_suspects {
                let sql = next_lease_end(self.mode, request.event_type.is_some());
                let mut query = sqlx::query_scalar(self.sql(&sql)).bind(micros(request.lease));
                if let Some(event_type) = request.event_type {
                    query = query.bind(event_type);
                }
                let ends: Option<i64> = query.bind(joined(request.in_flight)).fetch_one(&mut *scan).await?;
                first = first.into_iter().chain(ends.map(span)).min();
            }
            scan.commit().await?;
            Ok(first)
        };
        doing("claim from the outbox", next_due).await
    }

    async fn blocked_rows(&self, after: Option<Position>, batch: usize) -> Result<BlockedRows, StoreError> {
        let sweep = async {
            let (time, seq) = bound(after);
            let mut scan = self.claims.begin(BEGIN_OWN).await?;
            let read = sqlx::query(self.sql(BLOCKED_ROWS)).bind(time).bind(time).bind(seq).bind(limit(batch));
            let rows = read.fetch_all(&mut *scan).await?;
            scan.commit().await?;
            let mut blocked = BlockedRows::default();
            for row in &rows {
                let seq: i64 = row.try_get(0)?;
                blocked.last = Some(position(row.try_get(1)?, seq)).filter(|_| rows.len() >= batch);
                if row.try_get(2)? {
                    blocked.orphans.push(seq);
                }
            }
            Ok(blocked)
        };
        doing("sweep the blocked rows of the outbox", sweep).await
    }

    async fn unlocked_unfinished(&self, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        let ask = async {
            let unlocked = sqlx::query(self.sql(UNLOCKED_UNFINISHED)).bind(list(rows));
            let unlocked = self.claims.fetch(unlocked).await?;
            Ok(unlocked.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?)
        };
        doing("check the blocked rows of the outbox", ask).await
    }

    async fn unblock_rows(&self, rows: &[i64]) -> Result<(), StoreError> {
        let unblock = async {
            let mut work = self.claims.begin(BEGIN_OWN).await?;
            self.unblock(&mut work, rows.to_vec()).await?;
            work.commit().await
        };
        doing("unblock rows of the outbox", unblock).await
    }

    async fn pending_types(&self) -> Result<Vec<String>, StoreError> {
        let list = async {
            let mut scan = self.claims.begin(BEGIN_OWN).await?;
            let types = self.oldest_due_of_types(&mut scan).await?;
            scan.commit().await?;
            Ok(types.into_iter().map(|(event_type, _)| event_type).collect())
        };
        doing("list the pending event types of the outbox", list).await
    }
}

impl OutboxStore {
    async fn read_due(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, Failed> {
        // Rows in flight are few, so they are left out here and not in the statement.
        let max = request.limit.saturating_add(request.in_flight.len());
        let query = bind_due(sqlx::query(self.sql(&pending(request.event_type.is_some()))), request);
        let mut scan = self.claims.begin(BEGIN_OWN).await?;
        let rows = query.bind(limit(max)).fetch_all(&mut *scan).await?;
        let mut candidates = candidates(&rows, request)?;
        candidates.truncate(request.limit);
        let Selection { claimed, is_cut, .. } = select(&candidates);
        let mut rows = Vec::with_capacity(claimed.len());
        if !claimed.is_empty() {
            // Another program may have changed the rows in between.
            let read = format!("{} WHERE pending = 1 AND available_at <= {{now}}", read());
            rows = self.read_rows(&mut scan, &read, &claimed).await?;
        }
        scan.commit().await?;
        let last = candidates.get(claimed.len().wrapping_sub(1)).map(|last| last.position);
        Ok(ClaimedRows { rows, more: is_cut, last, blocked: Vec::new() })
    }

    async fn lease_due(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, Failed> {
        let mut scan = self.claims.begin(BEGIN_OWN).await?;
        let query = bind_due(sqlx::query(self.sql(&free(request.event_type.is_some()))), request);
        let query = bind_free(query, request).bind(limit(request.limit));
        let rows = query.fetch_all(&mut *scan).await?;
        let is_full = rows.len() >= request.limit;
        let candidates = candidates(&rows, request)?;
        let selection = select(&candidates);
        let last = match selection.claimed.last() {
            Some(last) => candidates.iter().find(|candidate| candidate.position.seq == *last),
            None => candidates.last(),
        };
        let last = last.map(|last| last.position);
        let rows = self.carry_out(&mut scan, &selection, request.claim_id).await?;
        scan.commit().await?;
        Ok(ClaimedRows { rows, more: is_full || selection.is_cut, last, blocked: Vec::new() })
    }

    async fn lease_runs(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, Failed> {
        let mut scan = self.claims.begin(BEGIN_OWN).await?;
        let ready = sqlx::query(self.sql(&ready(request.event_type.is_some())));
        let ready = bind_free(bind_due(ready, request), request).bind(limit(request.limit));
        let mut rows: Vec<i64> = Vec::new();
        for row in ready.fetch_all(&mut *scan).await? {
            rows.push(row.try_get(0)?);
        }
        let is_full = rows.len() >= request.limit;
        rows.sort_unstable();
        let candidates = self.lock_candidates(&mut scan, &rows, request).await?;
        let selection = select(&candidates);
        let rows = self.carry_out(&mut scan, &selection, request.claim_id).await?;
        if !selection.blocked.is_empty() {
            let mut in_order: Vec<i64> = selection.blocked.iter().map(|(row, _)| *row).collect();
            in_order.sort_unstable();
            sqlx::query(self.sql(BLOCK)).bind(list(&in_order)).execute(&mut *scan).await?;
        }
        scan.commit().await?;
        // A cut selection leaves candidates unclaimed, so the next claim begins where this one began.
        let last = candidates.last().map(|last| last.position).filter(|_| !selection.is_cut);
        Ok(ClaimedRows { rows, more: is_full || selection.is_cut, last, blocked: selection.blocked })
    }

    /// Locks rows and reads their predecessors. Returns them in the order of delivery.
    async fn lock_candidates(
        &self,
        scan: &mut MySqlConnection,
        ready: &[i64],
        request: &ClaimRequest<'_>,
    ) -> Result<Vec<Candidate>, sqlx::Error> {
        if ready.is_empty() {
            return Ok(Vec::new());
        }
        let query = bind_free(sqlx::query(self.sql(&lock_ready())).bind(list(ready)), request);
        let rows = query.fetch_all(&mut *scan).await?;
        let (mut locked, mut keys) = (Vec::with_capacity(rows.len()), HashMap::with_capacity(rows.len()));
        for row in &rows {
            let seq = row.try_get(0)?;
            locked.push(seq);
            keys.insert(seq, key_of(row.try_get(5)?, row.try_get(6)?));
        }
        let mut predecessors: HashMap<i64, Option<i64>> = HashMap::with_capacity(rows.len());
        for row in sqlx::query(self.sql(PREDECESSORS)).bind(list(&locked)).fetch_all(scan).await? {
            predecessors.insert(row.try_get(0)?, row.try_get(1)?);
        }
        let mut candidates = candidates(&rows, request)?;
        for candidate in &mut candidates {
            candidate.key = keys.remove(&candidate.position.seq).flatten();
            candidate.predecessor = predecessors.get(&candidate.position.seq).copied().flatten();
        }
        Ok(candidates)
    }

    /// Leases the selected rows, or marks the selected row as DEAD. Returns the rows in the order of the selection.
    async fn carry_out(
        &self,
        scan: &mut MySqlConnection,
        selection: &Selection,
        claim_id: &str,
    ) -> Result<Vec<ClaimedRow>, sqlx::Error> {
        if let Some((dead, error)) = &selection.dead {
            let mark = sqlx::query(self.sql(MARK_DEAD)).bind(error).bind(selection.losses).bind(dead);
            mark.execute(&mut *scan).await?;
            if self.mode == Mode::Ordered(DeadHead::Skip) {
                self.unblock_behind(scan, &[*dead]).await?;
            }
            return self.read_rows(scan, &read(), &[*dead]).await;
        }
        if selection.claimed.is_empty() {
            return Ok(Vec::new());
        }
        let mut in_order = selection.claimed.clone();
        in_order.sort_unstable();
        let lease = sqlx::query(self.sql(LEASE)).bind(list(&in_order)).bind(claim_id).bind(selection.losses);
        lease.execute(&mut *scan).await?;
        self.read_rows(scan, &read(), &selection.claimed).await
    }

    /// Reads rows, and returns them in the order in which they are listed.
    async fn read_rows(
        &self,
        connection: &mut MySqlConnection,
        sql: &str,
        rows: &[i64],
    ) -> Result<Vec<ClaimedRow>, sqlx::Error> {
        let is_ordered = matches!(self.mode, Mode::Ordered(_));
        let mut by_seq = HashMap::with_capacity(rows.len());
        for row in sqlx::query(self.sql(sql)).bind(list(rows)).fetch_all(connection).await? {
            let mut claimed = due(&row)?;
            if is_ordered {
                claimed.key = key(&row)?;
            }
            by_seq.insert(claimed.position.seq, claimed);
        }
        Ok(rows.iter().filter_map(|seq| by_seq.remove(seq)).collect())
    }

    /// The event types of which a row is due, and for how long the first row of each has been due.
    pub(super) async fn oldest_due_of_types(
        &self,
        scan: &mut MySqlConnection,
    ) -> Result<Vec<(String, Duration)>, sqlx::Error> {
        let (mut types, mut after) = (Vec::new(), String::new());
        loop {
            let list = sqlx::query(self.sql(PENDING_TYPES)).bind(&after).bind(TYPES);
            let rows = list.fetch_all(&mut *scan).await?;
            for row in &rows {
                after = row.try_get(0)?;
                if let Some(age) = row.try_get::<Option<i64>, _>(1)? {
                    types.push((after.clone(), span(age)));
                }
            }
            if (rows.len() as i64) < TYPES || types.len() >= MAX_LISTED_TYPES {
                return Ok(types);
            }
        }
    }

    async fn first_due(
        &self,
        scan: &mut MySqlConnection,
        request: &ClaimRequest<'_>,
    ) -> Result<Option<Duration>, sqlx::Error> {
        let sql = next_due(self.mode, request.event_type.is_some());
        // Usually the first row is not in flight. Otherwise one row more than are in flight includes one that is not.
        for max in [1, request.in_flight.len().saturating_add(1)] {
            let mut query = sqlx::query(self.sql(&sql));
            if self.mode.leases_rows() {
                query = query.bind(request.allow_suspects);
            }
            if let Some(event_type) = request.event_type {
                query = query.bind(event_type);
            }
            let rows = query.bind(limit(max)).fetch_all(&mut *scan).await?;
            let in_flight: HashSet<i64> = request.in_flight.iter().copied().collect();
            for row in &rows {
                if !in_flight.contains(&row.try_get(0)?) {
                    return Ok(Some(span(row.try_get(1)?)));
                }
            }
            if rows.len() < max {
                break;
            }
        }
        Ok(None)
    }
}

/// The rows that are not in flight here, in the order of delivery, without keys.
fn candidates(rows: &[MySqlRow], request: &ClaimRequest<'_>) -> Result<Vec<Candidate>, sqlx::Error> {
    let in_flight: HashSet<i64> = request.in_flight.iter().copied().collect();
    let read = |row: &MySqlRow| {
        Ok(Candidate {
            position: position(row.try_get(1)?, row.try_get(0)?),
            ended_lease: row.try_get(2)?,
            lease_losses: row.try_get::<i64, _>(3)?.max(0) as u32,
            bytes: row.try_get::<i64, _>(4)?.max(0) as usize,
            key: None,
            predecessor: None,
        })
    };
    let mut candidates = rows.iter().map(read).collect::<Result<Vec<_>, sqlx::Error>>()?;
    candidates.retain(|candidate| !in_flight.contains(&candidate.position.seq));
    candidates.sort_unstable_by_key(|candidate| candidate.position);
    Ok(candidates)
}

type Bound<'q> = Query<'q, MySql, MySqlArguments>;

/// The binds of [`due_rows`].
fn bind_due<'q>(mut query: Bound<'q>, request: &ClaimRequest<'q>) -> Bound<'q> {
    if let Some(event_type) = request.event_type {
        query = query.bind(event_type);
    }
    let (time, seq) = bound(request.after);
    query.bind(time).bind(time).bind(seq).bind(micros(request.skip_recent))
}

/// The binds of [`FREE`].
fn bind_free<'q>(query: Bound<'q>, request: &ClaimRequest<'q>) -> Bound<'q> {
    let query = query.bind(micros(request.lease)).bind(micros(request.lease / 10));
    query.bind(joined(request.in_flight)).bind(request.allow_suspects)
}

/// A list of rows as `FIND_IN_SET` searches it.
fn joined(rows: &[i64]) -> String {
    let rows: Vec<String> = rows.iter().map(i64::to_string).collect();
    rows.join(",")
}

/// The position after which to begin, as binds.
fn bound(after: Option<Position>) -> (NaiveDateTime, i64) {
    match after {
        Some(Position { due, seq }) => (DateTime::from_timestamp_micros(due).unwrap_or_else(earliest).naive_utc(), seq),
        None => (earliest().naive_utc(), i64::MIN),
    }
}
