use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use posthaste_core::StoreError;
use posthaste_core::outbox::{
    Selection, DEAD_AFTER_LOSSES, DeadHead, MAX_CLAIM_BYTES, Candidate, Mode, ClaimedRow, Position, STARTED, ClaimedRows, ClaimRequest,
    select_runs,
};
use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Row, Sqlite, SqliteConnection};

use super::undecodable::UndecodableType;
use super::rows::{DUE_COLUMNS, Due, EVENT_COLUMNS, due, key};
use super::settle::UNBLOCK;
use super::{OutboxStore, json};
use crate::outbox::{SOONEST_TAKEOVER, SWEEP_BATCH, unblocked};
use crate::sqlite::clock::{millis, millis_of, span};

/// How many leases a free row has lost, with the one that is taken over now. After the first, only a lease under which its
/// delivery had started counts.
fn losses() -> String {
    format!(
        "lease_losses + (locked_at IS NOT NULL AND (lease_losses = 0 OR coalesce(locked_by, '') LIKE '%{STARTED}'))"
    )
}

/// A loose index scan: one seek per type, however many rows each has.
pub(super) const PENDING_TYPES: &str = "WITH RECURSIVE kind (event_type) AS (
         SELECT min(event_type) FROM {table} INDEXED BY {table}_pending_of_type WHERE status IN (0, 2)
         UNION ALL
         SELECT (SELECT min(event_type) FROM {table} INDEXED BY {table}_pending_of_type
                 WHERE status IN (0, 2) AND event_type > kind.event_type)
         FROM kind WHERE kind.event_type IS NOT NULL
     )
     SELECT typeof(event_type) = 'text', CAST(event_type AS BLOB) FROM kind WHERE event_type IS NOT NULL AND EXISTS (
         SELECT 1 FROM {table} INDEXED BY {table}_pending_of_type
         WHERE status IN (0, 2) AND event_type = kind.event_type AND due <= {now_ms})";

/// Reads what is due, in the order of delivery, for claims in memory. Binds: see [`due_rows`].
pub(super) fn pending(of_one_type: bool) -> String {
    let due = due_rows(Mode::SingleNode, of_one_type);
    format!("SELECT {EVENT_COLUMNS}, {DUE_COLUMNS} FROM {due} ORDER BY due, seq LIMIT ?2")
}

/// Meets what is due and not leased, in the order of delivery; in ordered mode, with what each row has to wait for.
/// Binds: see [`due_rows`]; the lease in milliseconds, whether suspects may be claimed.
///
/// A lease that began in the future was taken before the clock was set back: nobody can tell when it ends, so it has ended.
pub(super) fn meet(mode: Mode, of_one_type: bool) -> String {
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
        "SELECT seq, due, {losses},
             coalesce(octet_length(payload), octet_length(payload_bytes)), aggregate_type, aggregate_id, {predecessor}
         FROM {due}
           AND (locked_at IS NULL OR coalesce({locked_at}, 0) <= {{now_ms}} - ?7
                OR coalesce({locked_at}, 0) > {{now_ms}} + ?7 / 10)
           AND (?8 OR (locked_at IS NULL AND lease_losses = 0))
         ORDER BY due, seq LIMIT ?2",
        losses = losses()
    )
}

/// LeaseSet rows that were met, and answers in no order. Binds: the rows, the lock.
///
/// Only a suspect may go dead on the way: the usual lease changes no column that is in an index.
pub(super) fn lease(is_suspect: bool) -> String {
    let losses = losses();
    let lost = format!("locked_at IS NOT NULL AND {losses} >= {DEAD_AFTER_LOSSES}");
    let leased = match is_suspect {
        true => format!(
            "lease_losses = {losses},
             status = CASE WHEN {lost} THEN 3 ELSE status END,
             done_at = CASE WHEN {lost} THEN {{now}} END,
             last_error = CASE WHEN {lost} THEN 'lease_lost: ' || ({losses}) || ' processes that claimed it did not settle it' ELSE last_error END,
             locked_by = CASE WHEN {lost} THEN NULL ELSE ?2 END,
             locked_at = CASE WHEN {lost} THEN NULL ELSE {{now}} END"
        ),
        false => "locked_by = ?2, locked_at = {now}".to_owned(),
    };
    format!(
        "UPDATE {{table}} SET {leased} WHERE seq IN (SELECT value FROM json_each(?1))
         RETURNING {EVENT_COLUMNS}, {DUE_COLUMNS}"
    )
}

/// Blocks rows behind others that are unfinished. Nobody else writes meanwhile: who finishes one of them later finds what is
/// blocked behind it. Binds: the rows.
pub(super) const BLOCK: &str = "UPDATE {table} SET blocked = 1 WHERE seq IN (SELECT value FROM json_each(?1))";

/// Which of the next blocked rows wait for nobody. Binds: the row behind which to begin, the limit.
pub(super) const ORPHANED: &str = "SELECT seq, NOT EXISTS (
         SELECT 1 FROM {table} AS earlier INDEXED BY {table}_key
         WHERE earlier.aggregate_type = item.aggregate_type AND earlier.aggregate_id = item.aggregate_id
           AND earlier.{unfinished} AND earlier.seq < item.seq)
     FROM {table} AS item INDEXED BY {table}_blocked WHERE blocked = 1 AND seq > ?1 ORDER BY seq LIMIT ?2";

/// Binds: the rows.
const UNBLOCK_ORPHANED: &str = "UPDATE {table} SET blocked = 0 WHERE seq IN (SELECT value FROM json_each(?1))";

/// How long until the first row is due that is not left out, or until the first lease ends of another process. Binds: the
/// rows to leave out, whether a suspect may be claimed, the event type, the lease in milliseconds.
///
/// LeaseSet are looked for at the head only, because claims take rows from there.
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

/// The table with the index that has what is due in order, and what is due behind a position and old enough. Binds: the
/// rows to leave out as a JSON array, the limit, the position behind which to begin (time and number), how old a row must
/// be in milliseconds, the event type.
///
/// The index is named because every other way to these rows sorts or scans; statistics must not change that.
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
        // No index has these by type; it is not read by channels, whose types keep no order among each other.
        (Mode::Ordered(_), true) => ("{table}_ready", format!("AND blocked = 0 AND event_type = {bind}")),
        (Mode::Ordered(_), false) => ("{table}_ready", "AND blocked = 0".to_owned()),
        (_, true) => ("{table}_pending_of_type", format!("AND event_type = {bind}")),
        (_, false) => ("{table}_pending", String::new()),
    }
}

/// What a claim asks for, for as long as the writer needs it.
struct Asked {
    event_type: Option<String>,
    in_flight: String,
    limit: i64,
    after: Position,
    claim_id: String,
    lease: i64,
    suspects: bool,
    skip_recent: i64,
    /// Where to look for what is blocked and orphaned, when it is time.
    looks_behind: Option<Position>,
}

impl Asked {
    fn of(request: &ClaimRequest<'_>) -> Result<Self, sqlx::Error> {
        Ok(Self {
            event_type: request.event_type.map(str::to_owned),
            in_flight: json(request.in_flight)?,
            limit: i64::try_from(request.limit).unwrap_or(i64::MAX),
            after: request.after.unwrap_or(Position { due: i64::MIN, seq: i64::MIN }),
            claim_id: request.claim_id.to_owned(),
            lease: millis(request.lease),
            suspects: request.allow_suspects,
            skip_recent: millis(request.skip_recent),
            looks_behind: None,
        })
    }

    /// Binds what [`due_rows`] asks for.
    fn bind<'q>(&'q self, query: Query<'q, Sqlite, SqliteArguments>) -> Query<'q, Sqlite, SqliteArguments> {
        let Position { due, seq } = self.after;
        let query = query.bind(&self.in_flight).bind(self.limit).bind(due).bind(seq).bind(self.skip_recent);
        query.bind(self.event_type.as_deref())
    }
}

impl OutboxStore {
    pub(super) async fn read_due(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, sqlx::Error> {
        let asked = Asked::of(request)?;
        let query = asked.bind(sqlx::query(self.sql(&pending(request.event_type.is_some()))));
        let mut rows = query.fetch(self.0.database.readers());
        let (mut taken, mut bytes) = (ClaimedRows::default(), 0);
        while let Some(row) = rows.try_next().await? {
            let Due { pending, payload_bytes } = due(&row)?;
            bytes += payload_bytes;
            taken.last = Some(pending.position);
            taken.rows.push(pending);
            if bytes >= MAX_CLAIM_BYTES {
                taken.more = true;
                break;
            }
        }
        Ok(taken)
    }

    pub(super) async fn lease_due(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, StoreError> {
        const DOING: &str = "claim from the outbox";
        let mut asked = Asked::of(request).map_err(|error| super::store_error(DOING, error))?;
        asked.looks_behind = if self.is_ordered() { self.0.sweeper.next() } else { None };
        let (store, asked) = (self.clone(), Arc::new(asked));
        let lease = self.0.database.write(DOING, move |connection| {
            let (store, asked) = (store.clone(), asked.clone());
            Box::pin(async move { store.lease_runs(connection, &asked).await })
        });
        lease.await
    }

    /// In multi-node mode, every row is a run of its own.
    async fn lease_runs(&self, connection: &mut SqliteConnection, asked: &Asked) -> Result<ClaimedRows, sqlx::Error> {
        if let Some(after) = asked.looks_behind {
            self.unblock_orphaned(connection, after).await?;
        }
        let met = self.meet(connection, asked).await?;
        let Selection { taken: chosen, blocked, is_cut } = select_runs(&met);
        let is_suspect = met.iter().any(|met| met.losses > 0 && chosen.first() == Some(&met.position.seq));
        let rows = match chosen.is_empty() {
            true => Vec::new(),
            false => self.lease_chosen(connection, &chosen, is_suspect, &asked.claim_id).await?,
        };
        if !blocked.is_empty() {
            let blocked: Vec<i64> = blocked.into_iter().map(|(row, _)| row).collect();
            sqlx::query(self.sql(BLOCK)).bind(json(&blocked)?).execute(connection).await?;
        }
        let is_full = met.len() as i64 >= asked.limit;
        // What was cut off stands among what was met: the next claim begins where this one did.
        let last = met.last().map(|met| met.position).filter(|_| !is_cut);
        Ok(ClaimedRows { rows, more: is_full || is_cut, last, is_held_up: false })
    }

    /// Looks at some of what is blocked.
    async fn unblock_orphaned(&self, connection: &mut SqliteConnection, after: Position) -> Result<(), sqlx::Error> {
        let look = sqlx::query(self.sql(ORPHANED)).bind(after.seq).bind(SWEEP_BATCH as i64);
        let rows = look.fetch_all(&mut *connection).await?;
        let (mut last, mut orphaned) = (None, Vec::new());
        for row in &rows {
            let seq: i64 = row.try_get(0)?;
            last = Some(Position { due: 0, seq });
            if row.try_get(1)? {
                orphaned.push(seq);
            }
        }
        if !orphaned.is_empty() {
            sqlx::query(self.sql(UNBLOCK_ORPHANED)).bind(json(&orphaned)?).execute(connection).await?;
        }
        self.0.sweeper.looked(rows.len(), last);
        Ok(())
    }

    async fn meet(&self, connection: &mut SqliteConnection, asked: &Asked) -> Result<Vec<Candidate>, sqlx::Error> {
        let sql = self.sql(&meet(self.0.mode, asked.event_type.is_some()));
        let query = asked.bind(sqlx::query(sql)).bind(asked.lease).bind(asked.suspects);
        let rows = query.fetch_all(connection).await?;
        let is_ordered = self.is_ordered();
        let read = |row: &SqliteRow| {
            Ok(Candidate {
                position: Position { due: row.try_get(1)?, seq: row.try_get(0)? },
                losses: row.try_get::<i64, _>(2)?.max(0) as u32,
                bytes: row.try_get::<Option<i64>, _>(3)?.unwrap_or_default().max(0) as usize,
                key: if is_ordered { key(row, 4, 5) } else { None },
                predecessor: row.try_get(6)?,
            })
        };
        rows.iter().map(read).collect()
    }

    /// Answers in the order in which the rows were chosen.
    async fn lease_chosen(
        &self,
        connection: &mut SqliteConnection,
        chosen: &[i64],
        is_suspect: bool,
        claim_id: &str,
    ) -> Result<Vec<ClaimedRow>, sqlx::Error> {
        let lease = sqlx::query(self.sql(&lease(is_suspect))).bind(json(chosen)?).bind(claim_id);
        let rows = lease.fetch_all(&mut *connection).await?;
        let (mut by_seq, mut passed) = (HashMap::with_capacity(rows.len()), Vec::new());
        for row in &rows {
            let Due { mut pending, .. } = due(row)?;
            if self.is_ordered() {
                pending.key = key(row, 2, 3);
            }
            if pending.is_dead && self.0.mode == Mode::Ordered(DeadHead::Skip) {
                passed.push(pending.position.seq);
            }
            by_seq.insert(pending.position.seq, pending);
        }
        self.unblock(connection, &passed).await?;
        Ok(chosen.iter().filter_map(|seq| by_seq.remove(seq)).collect())
    }

    /// Ordered mode: what waits behind these rows, once they are finished, may be met again.
    pub(super) async fn unblock(&self, connection: &mut SqliteConnection, rows: &[i64]) -> Result<(), sqlx::Error> {
        if rows.is_empty() || !self.is_ordered() {
            return Ok(());
        }
        let unblock = sqlx::query(self.sql(UNBLOCK)).bind(json(rows)?).bind(unblocked(rows.len()) as i64);
        unblock.execute(connection).await.map(|_| ())
    }

    pub(super) async fn first_due(&self, request: &ClaimRequest<'_>) -> Result<Option<Duration>, sqlx::Error> {
        let sql = self.sql(&next_due(self.0.mode, request.event_type.is_some()));
        let query = sqlx::query(sql).bind(json(request.in_flight)?).bind(request.allow_suspects).bind(request.event_type);
        let query = query.bind(millis(request.lease));
        let row = query.fetch_optional(self.0.database.readers()).await?;
        let wait: Option<i64> = row.map(|row| row.try_get(0)).transpose()?.flatten();
        Ok(wait.map(span))
    }

    /// Also those types that no channel can have.
    pub(super) async fn due_types(&self) -> Result<(Vec<String>, Vec<UndecodableType>), sqlx::Error> {
        let rows = sqlx::query(self.sql(PENDING_TYPES)).fetch_all(self.0.database.readers()).await?;
        let (mut types, mut nameless) = (Vec::with_capacity(rows.len()), Vec::new());
        for row in &rows {
            let (is_text, bytes) = (row.try_get(0)?, row.try_get(1)?);
            match std::str::from_utf8(bytes) {
                Ok(event_type) if is_text => types.push(event_type.to_owned()),
                _ => nameless.push(UndecodableType { is_text, bytes: bytes.to_vec() }),
            }
        }
        Ok((types, nameless))
    }
}
