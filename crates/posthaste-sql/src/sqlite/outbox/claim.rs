use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::TryStreamExt;
use posthaste_core::StoreError;
use posthaste_core::outbox::{
    BlockedRows, Candidate, ClaimRequest, ClaimStore, ClaimedRow, ClaimedRows, DeadHead, MAX_CLAIM_BYTES, Mode,
    Position, Selection, select, unblock_limit,
};
use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Row, Sqlite, SqliteConnection};

use super::OutboxStore;
use super::rows::{DUE_COLUMNS, Due, EVENT_COLUMNS, due, key, text};
use super::settle::UNBLOCK;
use super::undecodable::UndecodableType;
use crate::outbox::{SOONEST_TAKEOVER, limit};
use crate::sqlite::clock::{millis, millis_of, span};
use crate::sqlite::errors::{doing, store_error};
use crate::sqlite::json::json;

/// The event types with pending rows, and for how long the first row of each has been due, in milliseconds (negative if
/// it is not due). A loose index scan: one seek per type, however many rows each has.
pub(super) const PENDING_TYPES: &str = "WITH RECURSIVE kind (event_type) AS (
         SELECT min(event_type) FROM {table} INDEXED BY {table}_pending_of_type WHERE status IN (0, 2)
         UNION ALL
         SELECT (SELECT min(event_type) FROM {table} INDEXED BY {table}_pending_of_type
                 WHERE status IN (0, 2) AND event_type > kind.event_type)
         FROM kind WHERE kind.event_type IS NOT NULL
     )
     SELECT typeof(event_type) = 'text', CAST(event_type AS BLOB), {now_ms} - (
         SELECT due FROM {table} INDEXED BY {table}_pending_of_type
         WHERE status IN (0, 2) AND event_type = kind.event_type ORDER BY due LIMIT 1)
     FROM kind WHERE event_type IS NOT NULL LIMIT 20000";

/// Reads due rows, in the order of delivery, for claims in memory. Binds: see [`due_rows`].
pub(super) fn pending(of_one_type: bool) -> String {
    let due = due_rows(Mode::SingleNode, of_one_type);
    format!("SELECT {EVENT_COLUMNS}, {DUE_COLUMNS} FROM {due} ORDER BY due, seq LIMIT ?2")
}

/// Reads due rows that are not leased, in the order of delivery; in ordered mode, with the predecessor of each row.
/// Binds: see [`due_rows`]; the lease in milliseconds, true if suspects are allowed.
///
/// A lease that began in the future was made before the clock was set back. Its end is unknown, so it counts as ended.
pub(super) fn candidates(mode: Mode, of_one_type: bool) -> String {
    let due = due_rows(mode, of_one_type);
    let locked_at = millis_of("locked_at");
    let predecessor = match mode {
        Mode::Ordered(_) => {
            "CASE WHEN aggregate_id IS NOT NULL THEN (
                 SELECT earlier.seq FROM {table} AS earlier INDEXED BY {table}_key
                 WHERE earlier.aggregate_type = item.aggregate_type AND earlier.aggregate_id = item.aggregate_id
                   AND earlier.{unfinished} AND earlier.seq < item.seq
                 ORDER BY earlier.seq DESC LIMIT 1) END"
        }
        _ => "NULL",
    };
    format!(
        "SELECT seq, due, CASE WHEN locked_at IS NOT NULL THEN coalesce(locked_by, '') END,
             CAST(lease_losses AS INTEGER),
             coalesce(octet_length(payload), octet_length(payload_bytes)), aggregate_type, aggregate_id, {predecessor}
         FROM {due}
           AND (locked_at IS NULL OR coalesce({locked_at}, 0) <= {{now_ms}} - ?7
                OR coalesce({locked_at}, 0) > {{now_ms}} + ?7 / 10)
           AND (?8 OR (locked_at IS NULL AND lease_losses = 0))
         ORDER BY due, seq LIMIT ?2"
    )
}

/// Leases rows and returns them in no order. Binds: the rows, the claim id; for suspects, their new `lease_losses`.
///
/// The usual lease changes no column that is in an index.
pub(super) fn lease(is_suspect: bool) -> String {
    let losses = if is_suspect { ", lease_losses = ?3" } else { "" };
    format!(
        "UPDATE {{table}} SET locked_by = ?2, locked_at = {{now}}{losses} WHERE seq IN (SELECT value FROM json_each(?1))
         RETURNING {EVENT_COLUMNS}, {DUE_COLUMNS}"
    )
}

/// Marks a row that lost too many leases as DEAD. Binds: the row, the error, its new `lease_losses`.
fn mark_dead() -> String {
    format!(
        "UPDATE {{table}} SET status = 3, done_at = {{now}}, last_error = ?2, lease_losses = ?3, locked_by = NULL,
             locked_at = NULL
         WHERE seq = ?1
         RETURNING {EVENT_COLUMNS}, {DUE_COLUMNS}"
    )
}

/// Blocks rows, because unfinished rows of their keys precede them. No other transaction writes meanwhile, so a
/// transaction that finishes a predecessor later sees the rows that it blocks. Binds: the rows.
pub(super) const BLOCK: &str = "UPDATE {table} SET blocked = 1 WHERE seq IN (SELECT value FROM json_each(?1))";

/// The next blocked rows, and which of them are orphans: no unfinished row of their key precedes them. Binds: the row
/// after which to begin, the limit.
pub(super) const BLOCKED_ROWS: &str = "SELECT seq, NOT EXISTS (
         SELECT 1 FROM {table} AS earlier INDEXED BY {table}_key
         WHERE earlier.aggregate_type = item.aggregate_type AND earlier.aggregate_id = item.aggregate_id
           AND earlier.{unfinished} AND earlier.seq < item.seq)
     FROM {table} AS item INDEXED BY {table}_blocked WHERE blocked = 1 AND seq > ?1 ORDER BY seq LIMIT ?2";

/// Binds: the rows.
const UNBLOCK_ROWS: &str = "UPDATE {table} SET blocked = 0 WHERE seq IN (SELECT value FROM json_each(?1))";

/// How long until the first row is due that is not left out, or until the first lease of another process ends. Binds:
/// the rows to leave out, true if suspects are allowed, the event type, the lease in milliseconds.
///
/// Leases are searched for at the head of the table only, because claims start there.
pub(super) fn next_due(mode: Mode, of_one_type: bool) -> String {
    let (index, of_type) = reading(mode, of_one_type, "?3");
    let free = if mode.leases_rows() { "AND locked_at IS NULL" } else { "" };
    let first = format!(
        "SELECT due - {{now_ms}} AS wait FROM {{table}} INDEXED BY {index}
         WHERE status IN (0, 2) {of_type} {free} AND (?2 OR lease_losses = 0)
           AND seq NOT IN (SELECT value FROM json_each(?1))
         ORDER BY due, seq LIMIT 1"
    );
    if !mode.leases_rows() {
        return first;
    }
    let (soonest, locked_at) = (SOONEST_TAKEOVER / 1_000, millis_of("locked_at"));
    format!(
        "SELECT min(wait) FROM (
             SELECT * FROM ({first})
             UNION ALL
             SELECT max({soonest}, min({locked_at}) - {{now_ms}} + ?4) FROM (
                 SELECT locked_at FROM {{table}} INDEXED BY {index}
                 WHERE status IN (0, 2) {of_type} AND due <= {{now_ms}}
                   AND seq NOT IN (SELECT value FROM json_each(?1))
                 ORDER BY due, seq LIMIT 1000)
             WHERE ?2 AND locked_at IS NOT NULL)"
    )
}

/// The table with the index that has due rows in order, and the condition for due rows after a position that are old
/// enough. Binds: the rows to leave out as a JSON array, the limit, the position after which to begin (time and
/// number), the minimum age of a row in milliseconds, the event type.
///
/// The index is named, because every other plan for these rows sorts or scans. Statistics must not change the plan.
fn due_rows(mode: Mode, of_one_type: bool) -> String {
    let (index, of_type) = reading(mode, of_one_type, "?6");
    let created_at = millis_of("created_at");
    format!(
        "{{table}} AS item INDEXED BY {index}
         WHERE status IN (0, 2) {of_type} AND due <= {{now_ms}} AND (due, seq) > (?3, ?4)
           AND (?5 = 0 OR coalesce({created_at}, 0) <= {{now_ms}} - ?5)
           AND seq NOT IN (SELECT value FROM json_each(?1))"
    )
}

fn reading(mode: Mode, of_one_type: bool, bind: &str) -> (&'static str, String) {
    match (mode, of_one_type) {
        // No index has ready rows by type, because channels do not read tables in ordered mode: they keep no order
        // between types.
        (Mode::Ordered(_), true) => ("{table}_ready", format!("AND blocked = 0 AND event_type = {bind}")),
        (Mode::Ordered(_), false) => ("{table}_ready", "AND blocked = 0".to_owned()),
        (_, true) => ("{table}_pending_of_type", format!("AND event_type = {bind}")),
        (_, false) => ("{table}_pending", String::new()),
    }
}

/// A claim request that the writer can own.
struct OwnedRequest {
    event_type: Option<String>,
    in_flight: String,
    limit: i64,
    after: Position,
    claim_id: String,
    lease: i64,
    allow_suspects: bool,
    skip_recent: i64,
}

impl OwnedRequest {
    fn of(request: &ClaimRequest<'_>) -> Result<Self, sqlx::Error> {
        Ok(Self {
            event_type: request.event_type.map(str::to_owned),
            in_flight: json(request.in_flight)?,
            limit: limit(request.limit),
            after: request.after.unwrap_or(Position { due: i64::MIN, seq: i64::MIN }),
            claim_id: request.claim_id.to_owned(),
            lease: millis(request.lease),
            allow_suspects: request.allow_suspects,
            skip_recent: millis(request.skip_recent),
        })
    }

    /// The binds of [`due_rows`].
    fn bind<'q>(&'q self, query: Query<'q, Sqlite, SqliteArguments>) -> Query<'q, Sqlite, SqliteArguments> {
        let Position { due, seq } = self.after;
        let query = query.bind(&self.in_flight).bind(self.limit).bind(due).bind(seq).bind(self.skip_recent);
        query.bind(self.event_type.as_deref())
    }
}

#[async_trait]
impl ClaimStore for OutboxStore {
    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, StoreError> {
        const DOING: &str = "claim from the outbox";
        if !self.0.mode.leases_rows() {
            return doing(DOING, self.read_due(request)).await;
        }
        let request = OwnedRequest::of(request).map_err(|error| store_error(DOING, error))?;
        let (store, request) = (self.clone(), Arc::new(request));
        let lease = self.0.database.write(DOING, move |connection| {
            let (store, request) = (store.clone(), request.clone());
            Box::pin(async move { store.lease_runs(connection, &request).await })
        });
        lease.await
    }

    async fn next_due(&self, request: &ClaimRequest<'_>) -> Result<Option<Duration>, StoreError> {
        let next_due = async {
            let sql = self.sql(&next_due(self.0.mode, request.event_type.is_some()));
            let query = sqlx::query(sql).bind(json(request.in_flight)?).bind(request.allow_suspects);
            let query = query.bind(request.event_type).bind(millis(request.lease));
            let row = query.fetch_optional(self.0.database.readers()).await?;
            let wait: Option<i64> = row.map(|row| row.try_get(0)).transpose()?.flatten();
            Ok(wait.map(span))
        };
        doing("claim from the outbox", next_due).await
    }

    async fn blocked_rows(&self, after: Option<Position>, batch: usize) -> Result<BlockedRows, StoreError> {
        let sweep = async {
            let after = after.map_or(i64::MIN, |after| after.seq);
            let read = sqlx::query(self.sql(BLOCKED_ROWS)).bind(after).bind(limit(batch));
            let rows = read.fetch_all(self.0.database.readers()).await?;
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

    /// One transaction writes at a time, and a claim is one: no row is finished while it blocks others.
    async fn unlocked_unfinished(&self, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        Ok(rows.iter().copied().collect())
    }

    async fn unblock_rows(&self, rows: &[i64]) -> Result<(), StoreError> {
        const DOING: &str = "unblock rows of the outbox";
        let (store, rows) = (self.clone(), json(rows).map_err(|error| store_error(DOING, error))?);
        let unblock = self.0.database.write(DOING, move |connection| {
            let unblock = sqlx::query(store.sql(UNBLOCK_ROWS)).bind(rows.clone());
            Box::pin(async move { unblock.execute(connection).await.map(|_| ()) })
        });
        unblock.await
    }

    /// Also marks rows as DEAD whose event type is not text in UTF-8: no channel could ever claim them.
    async fn pending_types(&self) -> Result<Vec<String>, StoreError> {
        let types = doing("list the pending event types of the outbox", self.oldest_due_of_types());
        let (types, undecodable) = types.await?;
        if !undecodable.is_empty() {
            self.mark_undecodable_dead(undecodable).await;
        }
        Ok(types.into_iter().map(|(event_type, _)| event_type).collect())
    }
}

impl OutboxStore {
    async fn read_due(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, sqlx::Error> {
        let request = OwnedRequest::of(request)?;
        let query = request.bind(sqlx::query(self.sql(&pending(request.event_type.is_some()))));
        let mut rows = query.fetch(self.0.database.readers());
        let (mut claimed, mut bytes) = (ClaimedRows::default(), 0);
        while let Some(row) = rows.try_next().await? {
            let Due { row, payload_bytes } = due(&row)?;
            bytes += payload_bytes;
            claimed.last = Some(row.position);
            claimed.rows.push(row);
            if bytes >= MAX_CLAIM_BYTES {
                claimed.more = true;
                break;
            }
        }
        Ok(claimed)
    }

    async fn lease_runs(
        &self,
        connection: &mut SqliteConnection,
        request: &OwnedRequest,
    ) -> Result<ClaimedRows, sqlx::Error> {
        let candidates = self.candidates(connection, request).await?;
        let selection = select(&candidates);
        let rows = self.carry_out(connection, &selection, &request.claim_id).await?;
        if !selection.blocked.is_empty() {
            let blocked: Vec<i64> = selection.blocked.iter().map(|(row, _)| *row).collect();
            sqlx::query(self.sql(BLOCK)).bind(json(&blocked)?).execute(connection).await?;
        }
        let is_full = limit(candidates.len()) >= request.limit;
        // A cut selection leaves candidates unclaimed, so the next claim begins where this one began.
        let last = candidates.last().map(|last| last.position).filter(|_| !selection.is_cut);
        Ok(ClaimedRows { rows, more: is_full || selection.is_cut, last, blocked: Vec::new() })
    }

    async fn candidates(
        &self,
        connection: &mut SqliteConnection,
        request: &OwnedRequest,
    ) -> Result<Vec<Candidate>, sqlx::Error> {
        let sql = self.sql(&candidates(self.0.mode, request.event_type.is_some()));
        let query = request.bind(sqlx::query(sql)).bind(request.lease).bind(request.allow_suspects);
        let rows = query.fetch_all(connection).await?;
        let is_ordered = self.is_ordered();
        let read = |row: &SqliteRow| {
            Ok(Candidate {
                position: Position { due: row.try_get(1)?, seq: row.try_get(0)? },
                ended_lease: text(row, 2),
                lease_losses: row.try_get::<i64, _>(3)?.max(0) as u32,
                bytes: row.try_get::<Option<i64>, _>(4)?.unwrap_or_default().max(0) as usize,
                key: if is_ordered { key(row, 5, 6) } else { None },
                predecessor: row.try_get(7)?,
            })
        };
        rows.iter().map(read).collect()
    }

    /// Leases the selected rows, or marks the selected row as DEAD. Returns the rows in the order of the selection.
    async fn carry_out(
        &self,
        connection: &mut SqliteConnection,
        selection: &Selection,
        claim_id: &str,
    ) -> Result<Vec<ClaimedRow>, sqlx::Error> {
        let losses = selection.losses;
        if let Some((dead, error)) = &selection.dead {
            let mark = sqlx::query(self.sql(&mark_dead())).bind(dead).bind(error).bind(losses);
            let rows = mark.fetch_all(&mut *connection).await?;
            if self.0.mode == Mode::Ordered(DeadHead::Skip) {
                self.unblock(connection, &[*dead]).await?;
            }
            return rows.iter().map(|row| due(row).map(|due| due.row)).collect();
        }
        if selection.claimed.is_empty() {
            return Ok(Vec::new());
        }
        let lease = sqlx::query(self.sql(&lease(losses > 0))).bind(json(&selection.claimed)?).bind(claim_id);
        let lease = if losses > 0 { lease.bind(losses) } else { lease };
        let mut by_seq = HashMap::with_capacity(selection.claimed.len());
        for row in &lease.fetch_all(connection).await? {
            let mut claimed = due(row)?.row;
            if self.is_ordered() {
                claimed.key = key(row, 2, 3);
            }
            by_seq.insert(claimed.position.seq, claimed);
        }
        Ok(selection.claimed.iter().filter_map(|seq| by_seq.remove(seq)).collect())
    }

    /// Ordered mode: unblocks the first rows after these, which are finished.
    pub(super) async fn unblock(&self, connection: &mut SqliteConnection, rows: &[i64]) -> Result<(), sqlx::Error> {
        if rows.is_empty() || !self.is_ordered() {
            return Ok(());
        }
        let unblock = sqlx::query(self.sql(UNBLOCK)).bind(json(rows)?).bind(limit(unblock_limit(rows.len())));
        unblock.execute(connection).await.map(|_| ())
    }

    /// The event types of which a row is due, and for how long the first row of each has been due. Also returns the
    /// types that are not text in UTF-8, which no channel can have.
    pub(super) async fn oldest_due_of_types(
        &self,
    ) -> Result<(Vec<(String, Duration)>, Vec<UndecodableType>), sqlx::Error> {
        let rows = sqlx::query(self.sql(PENDING_TYPES)).fetch_all(self.0.database.readers()).await?;
        let (mut types, mut undecodable) = (Vec::with_capacity(rows.len()), Vec::new());
        for row in &rows {
            let (is_text, bytes, age): (bool, &[u8], i64) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
            if age < 0 {
                continue;
            }
            match std::str::from_utf8(bytes) {
                Ok(event_type) if is_text => types.push((event_type.to_owned(), span(age))),
                _ => undecodable.push(UndecodableType { is_text, bytes: bytes.to_vec() }),
            }
        }
        Ok((types, undecodable))
    }
}
