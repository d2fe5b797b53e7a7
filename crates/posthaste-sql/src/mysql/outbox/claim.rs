use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use chrono::{DateTime, NaiveDateTime};
use posthaste_core::outbox::{
    Selection, DEAD_AFTER_LOSSES, DeadHead, MAX_CLAIM_BYTES, Candidate, Mode, ClaimedRow, Position, STARTED, SUSPECT_GROUP, ClaimedRows,
    ClaimRequest, select_runs, lease_lost_error,
};
use sqlx::mysql::{MySqlArguments, MySqlRow};
use sqlx::query::Query;
use sqlx::{MySql, MySqlConnection, Row};

use super::rows::{BYTES, DUE_COLUMNS, EVENT_COLUMNS, due, key, position};
use super::{BEGIN_OWN, OutboxStore, list};
use crate::mysql::clock::{earliest, micros, span};
use crate::outbox::{SOONEST_TAKEOVER, SWEEP_BATCH, key_of};
use crate::session::Failed;

/// How many types one statement lists: recursion has a limit, which is the server's.
const TYPES: i64 = 500;

/// A loose index scan: one seek per type, however many rows each has. Binds: the type behind which to begin, how many.
pub(super) const PENDING_TYPES: &str = "WITH RECURSIVE found (event_type, place) AS (
         (SELECT event_type, 1 FROM {table} FORCE INDEX ({table}_pending_of_type)
          WHERE pending = 1 AND event_type > ? ORDER BY event_type LIMIT 1)
         UNION ALL
         SELECT (SELECT later.event_type FROM {table} AS later FORCE INDEX ({table}_pending_of_type)
                 WHERE later.pending = 1 AND later.event_type > found.event_type ORDER BY later.event_type LIMIT 1),
             found.place + 1
         FROM found WHERE found.event_type IS NOT NULL AND found.place < ?
     )
     SELECT found.event_type, EXISTS (
         SELECT 1 FROM {table} AS due FORCE INDEX ({table}_pending_of_type)
         WHERE due.pending = 1 AND due.event_type = found.event_type AND due.available_at <= {now})
     FROM found WHERE found.event_type IS NOT NULL";

/// How many leases a free row has lost, with the one that is taken over now. After the first, only a lease under which its
/// delivery had started counts.
fn losses() -> String {
    format!(
        "CAST(lease_losses + IF(locked_at IS NOT NULL AND (lease_losses = 0 OR RIGHT(locked_by, {}) = '{STARTED}'), 1, 0)
             AS SIGNED)",
        STARTED.len()
    )
}

/// Finds what is due, in order, for claims in memory. Binds: the event type, the position behind which to begin (time twice,
/// and number), how old a row must be in microseconds, the limit.
pub(super) fn pending(of_one_type: bool) -> String {
    let due = due_rows(Mode::SingleNode, of_one_type);
    format!("SELECT seq, available_at, {BYTES}, 0, FALSE {due} ORDER BY available_at, seq LIMIT ?")
}

/// Finds and locks what is due and free, in order. Binds: as [`pending`] up to the age, then those of [`FREE`], the limit.
///
/// It waits for nobody, and no column of the index by which it locks is changed by a lease: nobody waits for another in
/// a circle.
pub(super) fn free(of_one_type: bool) -> String {
    let due = due_rows(Mode::MultiNode, of_one_type);
    format!(
        "SELECT seq, available_at, {BYTES}, {losses}, locked_at IS NOT NULL {due} AND {FREE}
         ORDER BY available_at, seq LIMIT ? FOR UPDATE SKIP LOCKED",
        losses = losses()
    )
}

/// Finds what is due, free and not blocked, in order, and locks nothing: who blocks a row changes the index by which it is
/// found. Binds: as [`free`].
pub(super) fn ready(of_one_type: bool) -> String {
    let due = due_rows(Mode::ORDERED, of_one_type);
    format!("SELECT seq {due} AND {FREE} ORDER BY available_at, seq LIMIT ?")
}

/// Locks those of the rows that are still due, free and not blocked. Binds: the rows, then those of [`FREE`].
pub(super) fn meet() -> String {
    format!(
        "SELECT seq, available_at, {BYTES}, {losses}, locked_at IS NOT NULL, aggregate_type, aggregate_id
         FROM {{rows}} WHERE ready = 1 AND available_at <= {{now}} AND {FREE} FOR UPDATE SKIP LOCKED",
        losses = losses()
    )
}

/// What each of the rows has to wait for. Binds: the rows.
///
/// A statement of its own, after the rows are locked: it sees whatever was committed together with them, however late that
/// was. A row that has been finished since is waited for a moment longer, and none is passed.
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

/// Rows of one claim have lost equally many leases. Binds: the rows, the lock, how many leases they have lost.
pub(super) const LEASE: &str = "UPDATE {rows} SET locked_by = ?, locked_at = {now}, lease_losses = ?";

/// A row that lost too many leases. Binds: the error, the losses, the row.
const DEAD: &str = "UPDATE {table} SET status = 3, done_at = {now}, last_error = ?, lease_losses = ?, locked_by = NULL,
         locked_at = NULL
     WHERE seq = ?";

/// Blocks rows that this transaction has locked, behind others that are unfinished. Binds: the rows.
pub(super) const BLOCK: &str = "UPDATE {rows} SET blocked = 1";

/// Which of these rows are unfinished and not about to be finished: nobody has locked them. Whoever finishes one of them
/// later sees what is blocked behind it by now. Binds: the rows.
///
/// A statement outside of a transaction: its locks are gone when the server has carried it out. No lock of ours may stand on
/// rows that others have claimed.
pub(super) const WAITED_FOR: &str = "SELECT seq FROM {rows} WHERE {unfinished} FOR UPDATE SKIP LOCKED";

/// What is blocked behind rows that are finished now, among the first rows of their keys. Binds: the rows, how many of a key
/// but one.
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

/// Unblocks rows, so that they are met again. Binds: the rows.
pub(super) const UNBLOCK: &str = "UPDATE {rows} SET blocked = 0";

/// Which of the next blocked rows wait for nobody. Binds: the time, twice, and the number of the row behind which to begin,
/// the limit.
pub(super) const ORPHANED: &str = "SELECT blocked.seq, blocked.available_at, NOT EXISTS (
         SELECT 1 FROM {table} AS earlier FORCE INDEX ({table}_key)
         WHERE earlier.unfinished = 1 AND earlier.aggregate_type = blocked.aggregate_type
           AND earlier.aggregate_id = blocked.aggregate_id AND earlier.seq < blocked.seq AND earlier.{unfinished})
     FROM {table} AS blocked FORCE INDEX ({table}_ready)
     WHERE blocked.ready = 0 AND blocked.available_at >= ? AND (blocked.available_at > ? OR blocked.seq > ?)
     ORDER BY blocked.available_at, blocked.seq LIMIT ?";

/// How long until the first rows are due. Binds: whether a suspect may be claimed where rows are leased, the event type,
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

/// How long until the first lease ends of another process, among the rows at the head, because claims take rows from there.
/// Binds: the lease in microseconds, the event type, the rows to leave out.
pub(super) fn next_lease_end(mode: Mode, of_one_type: bool) -> String {
    let (index, which) = index(mode, of_one_type);
    format!(
        "SELECT GREATEST({SOONEST_TAKEOVER}, TIMESTAMPDIFF(MICROSECOND, {{now}}, MIN(locked_at)) + ?)
         FROM (SELECT seq, locked_at FROM {{table}} FORCE INDEX ({{table}}_{index})
               WHERE {which} AND available_at <= {{now}} ORDER BY available_at, seq LIMIT 1000) AS head
         WHERE locked_at IS NOT NULL AND NOT FIND_IN_SET(seq, ?)"
    )
}

/// What no lease keeps from being claimed. Binds: the lease in microseconds, a tenth of it, the rows to leave out, whether
/// suspects may be claimed.
///
/// A lease that began in the future was taken before the clock was set back: nobody can tell when it ends, so it has ended.
///
/// What this process holds is leased as a rule and not looked up in the list, which is as long as what it holds.
const FREE: &str = "(locked_at IS NULL
         OR ((locked_at <= {now} - INTERVAL ? MICROSECOND OR locked_at > {now} + INTERVAL ? MICROSECOND)
             AND NOT FIND_IN_SET(seq, ?)))
     AND (? OR (locked_at IS NULL AND lease_losses = 0))";

/// What is due behind a position and old enough, read by the index that has it in order. No planner is left a choice:
/// statistics are always late for a table whose rows come and go in bursts.
fn due_rows(mode: Mode, of_one_type: bool) -> String {
    let (index, which) = index(mode, of_one_type);
    format!(
        "FROM {{table}} FORCE INDEX ({{table}}_{index})
         WHERE {which} AND available_at <= {{now}} AND available_at >= ? AND (available_at > ? OR seq > ?)
           AND created_at <= {{now}} - INTERVAL ? MICROSECOND"
    )
}

/// The index that has what a claim wants, and how its columns before the time are searched.
fn index(mode: Mode, of_one_type: bool) -> (&'static str, &'static str) {
    match (mode, of_one_type) {
        (Mode::Ordered(_), false) => ("ready", "ready = 1"),
        (Mode::Ordered(_), true) => ("ready", "ready = 1 AND event_type = ?"),
        (_, false) => ("pending", "pending = 1"),
        (_, true) => ("pending_of_type", "pending = 1 AND event_type = ?"),
    }
}

/// A due row before it is claimed.
struct Found {
    position: Position,
    bytes: usize,
    /// How many leases it has lost, with the one that is taken over now.
    losses: u32,
    /// A lease of it has ended.
    is_lost: bool,
}

impl Found {
    fn read(row: &MySqlRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            position: position(row.try_get(1)?, row.try_get(0)?),
            bytes: row.try_get::<i64, _>(2)?.max(0) as usize,
            losses: row.try_get::<i64, _>(3)?.max(0) as u32,
            is_lost: row.try_get(4)?,
        })
    }
}

impl OutboxStore {
    pub(super) async fn read_due(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, Failed> {
        // Rows that are left out are few, and are told apart here.
        let limit = request.limit.saturating_add(request.in_flight.len());
        let query = bind_due(sqlx::query(self.sql(&pending(request.event_type.is_some()))), request);
        let mut scan = self.claims.begin(BEGIN_OWN).await?;
        let rows = query.bind(bound_limit(limit)).fetch_all(&mut *scan).await?;
        let mut found = not_left_out(&rows, request)?;
        found.truncate(request.limit);
        let (chosen, is_cut) = choose(&found);
        let mut rows = Vec::with_capacity(chosen.len());
        if !chosen.is_empty() {
            // Somebody else's statement may have come in between.
            let read = format!("{} WHERE pending = 1 AND available_at <= {{now}}", read());
            rows = self.read_rows(&mut scan, &read, &chosen).await?;
        }
        scan.commit().await?;
        let last = found.get(chosen.len().wrapping_sub(1)).map(|found| found.position);
        Ok(ClaimedRows { rows, more: is_cut, last, is_held_up: false })
    }

    pub(super) async fn lease_due(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, Failed> {
        let mut scan = self.claims.begin(BEGIN_OWN).await?;
        let query = bind_due(sqlx::query(self.sql(&free(request.event_type.is_some()))), request);
        let query = bind_free(query, request).bind(bound_limit(request.limit));
        let rows = query.fetch_all(&mut *scan).await?;
        let is_full = rows.len() >= request.limit;
        let found = not_left_out(&rows, request)?;
        let (chosen, is_cut) = choose(&found);
        let last = match chosen.last() {
            Some(last) => found.iter().find(|found| found.position.seq == *last),
            None => found.last(),
        };
        let last = last.map(|found| found.position);
        let rows = self.lease_found(&mut scan, &found, &chosen, request.claim_id).await?;
        scan.commit().await?;
        Ok(ClaimedRows { rows, more: is_full || is_cut, last, is_held_up: false })
    }

    pub(super) async fn lease_runs(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, Failed> {
        self.sweep_blocked().await?;
        let mut scan = self.claims.begin(BEGIN_OWN).await?;
        let query = bind_free(bind_due(sqlx::query(self.sql(&ready(request.event_type.is_some()))), request), request);
        let mut ready: Vec<i64> = Vec::new();
        for row in query.bind(bound_limit(request.limit)).fetch_all(&mut *scan).await? {
            ready.push(row.try_get(0)?);
        }
        let is_full = ready.len() >= request.limit;
        ready.sort_unstable();
        let (found, met) = self.meet(&mut scan, &ready, request).await?;
        let Selection { taken: chosen, blocked, is_cut } = select_runs(&met);
        let rows = self.lease_found(&mut scan, &found, &chosen, request.claim_id).await?;
        if !blocked.is_empty() {
            let mut in_order: Vec<i64> = blocked.iter().map(|(row, _)| *row).collect();
            in_order.sort_unstable();
            sqlx::query(self.sql(BLOCK)).bind(list(&in_order)).execute(&mut *scan).await?;
        }
        scan.commit().await?;
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
        let predecessors: BTreeSet<i64> = blocked.iter().map(|(_, predecessor)| *predecessor).collect();
        let predecessors: Vec<i64> = predecessors.into_iter().collect();
        let waited_for = sqlx::query(self.sql(WAITED_FOR)).bind(list(&predecessors));
        let waited_for = self.claims.fetch(waited_for).await?;
        let waited_for = waited_for.iter().map(|row| row.try_get(0)).collect::<Result<HashSet<i64>, _>>()?;
        let free = blocked.iter().filter(|(_, predecessor)| !waited_for.contains(predecessor));
        let free: Vec<i64> = free.map(|(row, _)| *row).collect();
        let is_held_up = !free.is_empty();
        self.unblock_rows(free).await?;
        Ok(is_held_up)
    }

    async fn unblock_rows(&self, rows: Vec<i64>) -> Result<(), Failed> {
        if rows.is_empty() {
            return Ok(());
        }
        let mut work = self.claims.begin(BEGIN_OWN).await?;
        self.unblock(&mut work, rows).await?;
        work.commit().await
    }

    /// Looks at some of what is blocked, for rows that wait for nobody.
    async fn sweep_blocked(&self) -> Result<(), Failed> {
        let Some(after) = self.sweeper.next() else { return Ok(()) };
        let (time, seq) = bound(Some(after));
        let mut scan = self.claims.begin(BEGIN_OWN).await?;
        let look = sqlx::query(self.sql(ORPHANED)).bind(time).bind(time).bind(seq).bind(bound_limit(SWEEP_BATCH));
        let rows = look.fetch_all(&mut *scan).await?;
        scan.commit().await?;
        let (mut last, mut orphaned) = (None, Vec::new());
        for row in &rows {
            let seq: i64 = row.try_get(0)?;
            last = Some(position(row.try_get(1)?, seq));
            if row.try_get(2)? {
                orphaned.push(seq);
            }
        }
        self.unblock_rows(orphaned).await?;
        self.sweeper.looked(rows.len(), last);
        Ok(())
    }

    /// Locks rows and finds out what they wait for, in the order of reading.
    async fn meet(
        &self,
        scan: &mut MySqlConnection,
        ready: &[i64],
        request: &ClaimRequest<'_>,
    ) -> Result<(Vec<Found>, Vec<Candidate>), sqlx::Error> {
        if ready.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        let query = bind_free(sqlx::query(self.sql(&meet())).bind(list(ready)), request);
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
        let found = not_left_out(&rows, request)?;
        let met = found.iter().map(|found| Candidate {
            position: found.position,
            losses: found.losses,
            bytes: found.bytes,
            key: keys.remove(&found.position.seq).flatten(),
            predecessor: predecessors.get(&found.position.seq).copied().flatten(),
        });
        let met = met.collect();
        Ok((found, met))
    }

    /// LeaseSet rows that this transaction has locked, and answers in the order in which they were chosen.
    async fn lease_found(
        &self,
        scan: &mut MySqlConnection,
        found: &[Found],
        chosen: &[i64],
        claim_id: &str,
    ) -> Result<Vec<ClaimedRow>, sqlx::Error> {
        if chosen.is_empty() {
            return Ok(Vec::new());
        }
        // Rows of one claim have lost equally many leases, and rows that lost more than one are chosen alone.
        let Some(first) = found.iter().find(|found| found.position.seq == chosen[0]) else { return Ok(Vec::new()) };
        match first.is_lost && first.losses >= DEAD_AFTER_LOSSES {
            true => {
                let dead = sqlx::query(self.sql(DEAD)).bind(lease_lost_error(first.losses)).bind(first.losses);
                dead.bind(chosen[0]).execute(&mut *scan).await?;
                if self.mode == Mode::Ordered(DeadHead::Skip) {
                    self.unblock_behind(scan, chosen).await?;
                }
            }
            false => {
                let mut in_order = chosen.to_vec();
                in_order.sort_unstable();
                let lease = sqlx::query(self.sql(LEASE)).bind(list(&in_order)).bind(claim_id).bind(first.losses);
                lease.execute(&mut *scan).await?;
            }
        }
        self.read_rows(scan, &read(), chosen).await
    }

    /// In the order in which they were chosen.
    async fn read_rows(
        &self,
        connection: &mut MySqlConnection,
        sql: &str,
        chosen: &[i64],
    ) -> Result<Vec<ClaimedRow>, sqlx::Error> {
        let is_ordered = matches!(self.mode, Mode::Ordered(_));
        let mut by_seq = HashMap::with_capacity(chosen.len());
        for row in sqlx::query(self.sql(sql)).bind(list(chosen)).fetch_all(connection).await? {
            let mut pending = due(&row)?;
            if is_ordered {
                pending.key = key(&row)?;
            }
            by_seq.insert(pending.position.seq, pending);
        }
        Ok(chosen.iter().filter_map(|seq| by_seq.remove(seq)).collect())
    }

    pub(super) async fn first_due(&self, request: &ClaimRequest<'_>) -> Result<Option<Duration>, Failed> {
        let mut scan = self.claims.begin(BEGIN_OWN).await?;
        let mut first = self.first_due_on(&mut scan, request).await?;
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
    }

    async fn first_due_on(
        &self,
        scan: &mut MySqlConnection,
        request: &ClaimRequest<'_>,
    ) -> Result<Option<Duration>, sqlx::Error> {
        let sql = next_due(self.mode, request.event_type.is_some());
        // As a rule the first is not left out; else one among as many as are left out and one more is not.
        for limit in [1, request.in_flight.len().saturating_add(1)] {
            let mut query = sqlx::query(self.sql(&sql));
            if self.mode.leases_rows() {
                query = query.bind(request.allow_suspects);
            }
            if let Some(event_type) = request.event_type {
                query = query.bind(event_type);
            }
            let rows = query.bind(bound_limit(limit)).fetch_all(&mut *scan).await?;
            let in_flight: HashSet<i64> = request.in_flight.iter().copied().collect();
            for row in &rows {
                if !in_flight.contains(&row.try_get(0)?) {
                    return Ok(Some(span(row.try_get(1)?)));
                }
            }
            if rows.len() < limit {
                break;
            }
        }
        Ok(None)
    }

    pub(super) async fn due_types(&self) -> Result<Vec<String>, Failed> {
        let mut scan = self.claims.begin(BEGIN_OWN).await?;
        let (mut types, mut after) = (Vec::new(), String::new());
        loop {
            let list = sqlx::query(self.sql(PENDING_TYPES)).bind(&after).bind(TYPES);
            let rows = list.fetch_all(&mut *scan).await?;
            for row in &rows {
                after = row.try_get(0)?;
                if row.try_get(1)? {
                    types.push(after.clone());
                }
            }
            if (rows.len() as i64) < TYPES {
                scan.commit().await?;
                return Ok(types);
            }
        }
    }
}

/// Which rows of those found, in order, are taken, and whether something was not taken because of its weight. When the
/// first is a suspect, only suspects are taken: those that lost one lease in a group, any other alone.
fn choose(found: &[Found]) -> (Vec<i64>, bool) {
    let losses = found.first().map_or(0, |first| first.losses);
    let limit = match losses {
        0 => usize::MAX,
        1 => SUSPECT_GROUP,
        _ => 1,
    };
    let (mut chosen, mut weight) = (Vec::with_capacity(found.len()), 0);
    for found in found.iter().filter(|found| found.losses == losses).take(limit) {
        if weight >= MAX_CLAIM_BYTES {
            return (chosen, true);
        }
        chosen.push(found.position.seq);
        weight += found.bytes;
    }
    (chosen, false)
}

/// In the order of delivery.
fn not_left_out(rows: &[MySqlRow], request: &ClaimRequest<'_>) -> Result<Vec<Found>, sqlx::Error> {
    let in_flight: HashSet<i64> = request.in_flight.iter().copied().collect();
    let mut found = rows.iter().map(Found::read).collect::<Result<Vec<_>, _>>()?;
    found.retain(|found| !in_flight.contains(&found.position.seq));
    found.sort_unstable_by_key(|found| found.position);
    Ok(found)
}

type Bound<'q> = Query<'q, MySql, MySqlArguments>;

/// What [`due_rows`] wants.
fn bind_due<'q>(mut query: Bound<'q>, request: &ClaimRequest<'q>) -> Bound<'q> {
    if let Some(event_type) = request.event_type {
        query = query.bind(event_type);
    }
    let (time, seq) = bound(request.after);
    query.bind(time).bind(time).bind(seq).bind(micros(request.skip_recent))
}

/// What [`FREE`] wants.
fn bind_free<'q>(query: Bound<'q>, request: &ClaimRequest<'q>) -> Bound<'q> {
    let query = query.bind(micros(request.lease)).bind(micros(request.lease / 10));
    query.bind(joined(request.in_flight)).bind(request.allow_suspects)
}

/// A list of rows as `FIND_IN_SET` searches it.
fn joined(rows: &[i64]) -> String {
    let rows: Vec<String> = rows.iter().map(i64::to_string).collect();
    rows.join(",")
}

/// The position behind which to begin, as binds.
fn bound(after: Option<Position>) -> (NaiveDateTime, i64) {
    match after {
        Some(Position { due, seq }) => (DateTime::from_timestamp_micros(due).unwrap_or_else(earliest).naive_utc(), seq),
        None => (earliest().naive_utc(), i64::MIN),
    }
}

fn bound_limit(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}
