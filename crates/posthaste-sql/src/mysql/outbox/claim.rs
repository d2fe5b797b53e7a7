use std::collections::{HashMap, HashSet};
use std::time::Duration;

use chrono::{DateTime, NaiveDateTime};
use posthaste_core::outbox::{
    Chosen, DeadHead, MAX_CLAIM_BYTES, Met, Mode, Pending, Position, Taken, Wanted, choose_runs,
};
use sqlx::mysql::{MySqlArguments, MySqlRow};
use sqlx::query::Query;
use sqlx::{MySql, MySqlConnection, Row};

use super::rows::{BYTES, DUE_COLUMNS, EVENT_COLUMNS, due, key, position};
use super::{OutboxStore, list};
use crate::mysql::clock::{earliest, micros, span};
use crate::outbox::{STRETCH, key_of};

/// After how many lost leases a row is taken for the reason.
const TOO_MANY_LOSSES: i16 = 3;

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

/// Finds what is due, in order, for claims in memory. Binds: the event type, the position behind which to begin (time twice,
/// and number), how old a row must be in microseconds, the limit.
pub(super) fn pending(of_one_type: bool) -> String {
    let due = due_rows(Mode::SingleNode, of_one_type);
    format!("SELECT seq, available_at, {BYTES}, FALSE, 0 {due} ORDER BY available_at, seq LIMIT ?")
}

/// Finds and locks what is due and free, in order. Binds: as [`pending`] up to the age, then those of [`FREE`], the limit.
///
/// It waits for nobody, and no column of the index by which it locks is changed by a lease: nobody waits for another in
/// a circle.
pub(super) fn free(of_one_type: bool) -> String {
    let due = due_rows(Mode::MultiNode, of_one_type);
    format!(
        "SELECT seq, available_at, {BYTES}, locked_at IS NOT NULL, lease_losses {due} AND {FREE}
         ORDER BY available_at, seq LIMIT ? FOR UPDATE SKIP LOCKED"
    )
}

/// Finds what is due, free and not parked, in order, and locks nothing: who parks a row changes the index by which it is
/// found. Binds: as [`free`].
pub(super) fn ready(of_one_type: bool) -> String {
    let due = due_rows(Mode::ORDERED, of_one_type);
    format!("SELECT seq {due} AND {FREE} ORDER BY available_at, seq LIMIT ?")
}

/// Locks those of the rows that are still due, free and not parked. Binds: the rows, then those of [`FREE`].
pub(super) fn meet() -> String {
    format!(
        "SELECT seq, available_at, {BYTES}, locked_at IS NOT NULL, lease_losses, aggregate_type, aggregate_id
         FROM {{rows}} WHERE ready = 1 AND available_at <= {{now}} AND {FREE} FOR UPDATE SKIP LOCKED"
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

/// Binds: the rows, the lock, how many leases are lost now.
pub(super) const LEASE: &str = "UPDATE {rows}
     SET locked_by = ?, locked_at = {now}, lease_losses = lease_losses + ?";

/// A row that lost too many leases. Binds: the error, the losses, the row.
const BURY: &str = "UPDATE {table} SET status = 3, done_at = {now}, last_error = ?, lease_losses = ?, locked_by = NULL,
         locked_at = NULL
     WHERE seq = ?";

/// Locks rows that others wait for, so that they stay unfinished until this is committed. Binds: the rows.
pub(super) const STANDING: &str = "SELECT seq FROM {rows} WHERE {unfinished} FOR UPDATE SKIP LOCKED";

/// Parks rows behind others that are unfinished and stay so until this is committed: who finishes one of them then finds
/// what is parked behind it. Binds: the rows.
pub(super) const PARK: &str = "UPDATE {rows} SET parked = 1";

/// What is parked behind rows that are finished now, among the first rows of their keys. Binds: the rows, how many of a key
/// but one.
pub(super) const PARKED: &str = "SELECT next.seq FROM {rows}
     STRAIGHT_JOIN {table} AS next FORCE INDEX ({table}_key)
         ON next.unfinished = 1 AND next.aggregate_type = {table}.aggregate_type
        AND next.aggregate_id = {table}.aggregate_id AND next.seq <= COALESCE((
             SELECT until.seq FROM {table} AS until FORCE INDEX ({table}_key)
             WHERE until.unfinished = 1 AND until.aggregate_type = {table}.aggregate_type
               AND until.aggregate_id = {table}.aggregate_id AND until.{unfinished}
             ORDER BY until.seq LIMIT 1 OFFSET ?), 9223372036854775807)
     WHERE next.parked = 1";

/// Unparks rows, so that they are met again. Binds: the rows.
pub(super) const UNPARK: &str = "UPDATE {rows} SET parked = 0";

/// Which of the next parked rows wait for nobody. Binds: the time, twice, and the number of the row behind which to begin,
/// the limit.
pub(super) const FORGOTTEN: &str = "SELECT parked.seq, parked.available_at, NOT EXISTS (
         SELECT 1 FROM {table} AS earlier FORCE INDEX ({table}_key)
         WHERE earlier.unfinished = 1 AND earlier.aggregate_type = parked.aggregate_type
           AND earlier.aggregate_id = parked.aggregate_id AND earlier.seq < parked.seq AND earlier.{unfinished})
     FROM {table} AS parked FORCE INDEX ({table}_ready)
     WHERE parked.ready = 0 AND parked.available_at >= ? AND (parked.available_at > ? OR parked.seq > ?)
     ORDER BY parked.available_at, parked.seq LIMIT ?";

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

/// What no lease keeps from being claimed. Binds: the lease in microseconds, the rows to leave out, whether suspects may
/// be claimed.
///
/// What this process holds is leased as a rule and not looked up in the list, which is as long as what it holds.
const FREE: &str = "(locked_at IS NULL
         OR (locked_at <= {now} - INTERVAL ? MICROSECOND AND NOT FIND_IN_SET(seq, ?)))
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
    /// A lease of it has ended.
    is_lost: bool,
    /// How many were lost before.
    losses: i16,
}

impl Found {
    fn read(row: &MySqlRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            position: position(row.try_get(1)?, row.try_get(0)?),
            bytes: row.try_get::<i64, _>(2)?.max(0) as usize,
            is_lost: row.try_get(3)?,
            losses: row.try_get(4)?,
        })
    }

    /// A suspect is a row of which a lease was lost before or is lost now.
    fn is_suspect(&self) -> bool {
        self.is_lost || self.losses > 0
    }
}

impl OutboxStore {
    pub(super) async fn read_due(&self, wanted: &Wanted<'_>) -> Result<Taken, sqlx::Error> {
        // Rows that are left out are few, and are told apart here.
        let limit = wanted.limit.saturating_add(wanted.left_out.len());
        let query = bind_due(sqlx::query(self.sql(&pending(wanted.event_type.is_some()))), wanted);
        let rows = query.bind(bound_limit(limit)).fetch_all(&self.pool).await?;
        let mut found = not_left_out(&rows, wanted)?;
        found.truncate(wanted.limit);
        let (chosen, is_cut) = choose(&found);
        let mut rows = Vec::with_capacity(chosen.len());
        if !chosen.is_empty() {
            // Somebody else's statement may have come in between.
            let read = format!("{} WHERE pending = 1 AND available_at <= {{now}}", read());
            rows = self.read_rows(&mut *self.pool.acquire().await?, &read, &chosen).await?;
        }
        Ok(Taken { more: is_cut, last: found.get(chosen.len().wrapping_sub(1)).map(|found| found.position), rows })
    }

    pub(super) async fn lease_due(&self, wanted: &Wanted<'_>) -> Result<Taken, sqlx::Error> {
        let mut scan = self.transaction().await?;
        let query = bind_due(sqlx::query(self.sql(&free(wanted.event_type.is_some()))), wanted);
        let query = bind_free(query, wanted).bind(bound_limit(wanted.limit));
        let rows = query.fetch_all(&mut *scan).await?;
        let is_full = rows.len() >= wanted.limit;
        let found = not_left_out(&rows, wanted)?;
        let (chosen, is_cut) = choose(&found);
        let last = match chosen.last() {
            Some(last) => found.iter().find(|found| found.position.seq == *last),
            None => found.last(),
        };
        let last = last.map(|found| found.position);
        let rows = self.lease_found(&mut scan, &found, &chosen, wanted.lock).await?;
        scan.commit().await?;
        Ok(Taken { rows, more: is_full || is_cut, last })
    }

    pub(super) async fn lease_runs(&self, wanted: &Wanted<'_>) -> Result<Taken, sqlx::Error> {
        let mut scan = self.transaction().await?;
        self.free_forgotten(&mut scan).await?;
        let query = bind_free(bind_due(sqlx::query(self.sql(&ready(wanted.event_type.is_some()))), wanted), wanted);
        let mut ready: Vec<i64> = Vec::new();
        for row in query.bind(bound_limit(wanted.limit)).fetch_all(&mut *scan).await? {
            ready.push(row.try_get(0)?);
        }
        let is_full = ready.len() >= wanted.limit;
        ready.sort_unstable();
        let (found, met) = self.meet(&mut scan, &ready, wanted).await?;
        let Chosen { taken: chosen, parked, is_cut } = choose_runs(&met);
        let rows = self.lease_found(&mut scan, &found, &chosen, wanted.lock).await?;
        self.park(&mut scan, parked).await?;
        scan.commit().await?;
        // What was cut off stands among what was met: the next claim begins where this one did.
        let last = met.last().map(|met| met.position).filter(|_| !is_cut);
        Ok(Taken { rows, more: is_full || is_cut, last })
    }

    /// Looks at some of what is parked.
    async fn free_forgotten(&self, scan: &mut MySqlConnection) -> Result<(), sqlx::Error> {
        let Some(behind) = self.patrol.next() else { return Ok(()) };
        let (time, seq) = bound(Some(behind));
        let look = sqlx::query(self.sql(FORGOTTEN)).bind(time).bind(time).bind(seq).bind(bound_limit(STRETCH));
        let rows = look.fetch_all(&mut *scan).await?;
        let (mut last, mut forgotten) = (None, Vec::new());
        for row in &rows {
            let seq: i64 = row.try_get(0)?;
            last = Some(position(row.try_get(1)?, seq));
            if row.try_get(2)? {
                forgotten.push(seq);
            }
        }
        self.unpark(scan, forgotten).await?;
        self.patrol.looked(rows.len(), last);
        Ok(())
    }

    /// Locks rows and finds out what they wait for, in the order of reading.
    async fn meet(
        &self,
        scan: &mut MySqlConnection,
        ready: &[i64],
        wanted: &Wanted<'_>,
    ) -> Result<(Vec<Found>, Vec<Met>), sqlx::Error> {
        if ready.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        let query = bind_free(sqlx::query(self.sql(&meet())).bind(list(ready)), wanted);
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
        let found = not_left_out(&rows, wanted)?;
        let met = found.iter().map(|found| Met {
            position: found.position,
            is_suspect: found.is_suspect(),
            bytes: found.bytes,
            key: keys.remove(&found.position.seq).flatten(),
            predecessor: predecessors.get(&found.position.seq).copied().flatten(),
        });
        let met = met.collect();
        Ok((found, met))
    }

    /// Leases rows that this transaction has locked, and answers in the order in which they were chosen.
    async fn lease_found(
        &self,
        scan: &mut MySqlConnection,
        found: &[Found],
        chosen: &[i64],
        lock: &str,
    ) -> Result<Vec<Pending>, sqlx::Error> {
        if chosen.is_empty() {
            return Ok(Vec::new());
        }
        // Who lost a lease is chosen alone.
        let lost = match chosen {
            [one] => found.iter().find(|found| found.position.seq == *one && found.is_lost),
            _ => None,
        };
        match lost {
            Some(Found { losses, .. }) if losses + 1 >= TOO_MANY_LOSSES => {
                let losses = losses + 1;
                let error = format!("lease_lost: {losses} processes that claimed it did not settle it");
                let bury = sqlx::query(self.sql(BURY)).bind(error).bind(losses).bind(chosen[0]);
                bury.execute(&mut *scan).await?;
                if self.mode == Mode::Ordered(DeadHead::Skip) {
                    self.unpark_behind(scan, chosen).await?;
                }
            }
            _ => {
                let mut in_order = chosen.to_vec();
                in_order.sort_unstable();
                let lease = sqlx::query(self.sql(LEASE)).bind(list(&in_order)).bind(lock).bind(lost.is_some());
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
    ) -> Result<Vec<Pending>, sqlx::Error> {
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

    /// Parks rows whose predecessor is unfinished and cannot be finished before this is committed. The others are met again.
    async fn park(&self, scan: &mut MySqlConnection, waiting: Vec<(i64, i64)>) -> Result<(), sqlx::Error> {
        if waiting.is_empty() {
            return Ok(());
        }
        let mut predecessors: Vec<i64> = waiting.iter().map(|(_, predecessor)| *predecessor).collect();
        predecessors.sort_unstable();
        predecessors.dedup();
        let standing = sqlx::query_scalar(self.sql(STANDING)).bind(list(&predecessors)).fetch_all(&mut *scan).await?;
        let standing: HashSet<i64> = standing.into_iter().collect();
        let mut parked: Vec<i64> = Vec::with_capacity(waiting.len());
        for (row, predecessor) in waiting {
            if standing.contains(&predecessor) {
                parked.push(row);
            }
        }
        if parked.is_empty() {
            return Ok(());
        }
        parked.sort_unstable();
        sqlx::query(self.sql(PARK)).bind(list(&parked)).execute(scan).await.map(|_| ())
    }

    pub(super) async fn first_due(&self, wanted: &Wanted<'_>) -> Result<Option<Duration>, sqlx::Error> {
        let sql = next_due(self.mode, wanted.event_type.is_some());
        // As a rule the first is not left out; else one among as many as are left out and one more is not.
        for limit in [1, wanted.left_out.len().saturating_add(1)] {
            let mut query = sqlx::query(self.sql(&sql));
            if self.mode.leases_rows() {
                query = query.bind(wanted.suspects);
            }
            if let Some(event_type) = wanted.event_type {
                query = query.bind(event_type);
            }
            let rows = query.bind(bound_limit(limit)).fetch_all(&self.pool).await?;
            let left_out: HashSet<i64> = wanted.left_out.iter().copied().collect();
            for row in &rows {
                if !left_out.contains(&row.try_get(0)?) {
                    return Ok(Some(span(row.try_get(1)?)));
                }
            }
            if rows.len() < limit {
                break;
            }
        }
        Ok(None)
    }

    pub(super) async fn due_types(&self) -> Result<Vec<String>, sqlx::Error> {
        let (mut types, mut behind) = (Vec::new(), String::new());
        loop {
            let rows = sqlx::query(self.sql(PENDING_TYPES)).bind(&behind).bind(TYPES).fetch_all(&self.pool).await?;
            for row in &rows {
                behind = row.try_get(0)?;
                if row.try_get(1)? {
                    types.push(behind.clone());
                }
            }
            if (rows.len() as i64) < TYPES {
                return Ok(types);
            }
        }
    }
}

/// Which rows of those found, in order, are taken, and whether something was not taken because of its weight. A suspect is
/// taken alone, and only when it is the first.
fn choose(found: &[Found]) -> (Vec<i64>, bool) {
    if let Some(first) = found.first().filter(|first| first.is_suspect()) {
        return (vec![first.position.seq], false);
    }
    let (mut chosen, mut weight) = (Vec::with_capacity(found.len()), 0);
    for found in found.iter().filter(|found| !found.is_suspect()) {
        if weight >= MAX_CLAIM_BYTES {
            return (chosen, true);
        }
        chosen.push(found.position.seq);
        weight += found.bytes;
    }
    (chosen, false)
}

/// In the order of delivery.
fn not_left_out(rows: &[MySqlRow], wanted: &Wanted<'_>) -> Result<Vec<Found>, sqlx::Error> {
    let left_out: HashSet<i64> = wanted.left_out.iter().copied().collect();
    let mut found = rows.iter().map(Found::read).collect::<Result<Vec<_>, _>>()?;
    found.retain(|found| !left_out.contains(&found.position.seq));
    found.sort_unstable_by_key(|found| found.position);
    Ok(found)
}

type Bound<'q> = Query<'q, MySql, MySqlArguments>;

/// What [`due_rows`] wants.
fn bind_due<'q>(mut query: Bound<'q>, wanted: &Wanted<'q>) -> Bound<'q> {
    if let Some(event_type) = wanted.event_type {
        query = query.bind(event_type);
    }
    let (time, seq) = bound(wanted.behind);
    query.bind(time).bind(time).bind(seq).bind(micros(wanted.skip_recent))
}

/// What [`FREE`] wants.
fn bind_free<'q>(query: Bound<'q>, wanted: &Wanted<'q>) -> Bound<'q> {
    let left_out: Vec<String> = wanted.left_out.iter().map(i64::to_string).collect();
    query.bind(micros(wanted.lease)).bind(left_out.join(",")).bind(wanted.suspects)
}

/// The position behind which to begin, as binds.
fn bound(behind: Option<Position>) -> (NaiveDateTime, i64) {
    match behind {
        Some(Position { due, seq }) => (DateTime::from_timestamp_micros(due).unwrap_or_else(earliest).naive_utc(), seq),
        None => (earliest().naive_utc(), i64::MIN),
    }
}

fn bound_limit(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}
