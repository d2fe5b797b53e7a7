use bytes::Bytes;
use chrono::{DateTime, Utc};
use posthaste_core::Event;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::fill;
use super::lane::Position;
use crate::TableName;
use crate::outbox::{MAX_CLAIM_BYTES, Mode, OutboxRow, OutboxStatus, read_headers};

/// What [`read_event`] reads, from column 0.
const EVENT_COLUMNS: &str = "event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service, \
     resource_type, operation_type, payload, payload_bytes, content_type, headers, occurred_at, created_at";
/// The columns behind those of the event.
const AFTER_EVENT: usize = 14;

/// What [`Pending::read`] reads behind them. No payload is read for its length, also where it lies apart.
const PENDING_COLUMNS: &str = "seq, attempts, coalesce(octet_length(payload), octet_length(payload_bytes)) AS bytes, available_at, status, lease_losses";

/// Whether the lease that is lost now is one too many: after three, the row is taken for the reason.
const LOST: &str = "locked_at IS NOT NULL AND lease_losses >= 2";

/// Begins a transaction in which pending rows are read by their index, in its order.
///
/// Statistics are always late for a table whose rows come and go in bursts: a planner that takes ten thousand pending
/// rows for ten collects and sorts them all, in every claim. It is forbidden to; a small sort that has to be is then
/// priced so high that, but for `jit`, every claim would be compiled first. A lease that a crash of the server forgets
/// costs a second delivery at most, so nobody waits for its way to the disk.
pub(super) const SCAN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
     SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off;
     SET LOCAL jit = off; SET LOCAL synchronous_commit = off";

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

/// One event's row; the bind is its id.
pub(super) fn find(table: &TableName) -> String {
    let sql = format!(
        "SELECT {EVENT_COLUMNS}, status, attempts, available_at, done_at, last_error
         FROM {{table}} WHERE event_id = $1"
    );
    fill(&sql, table)
}

/// Reads what is due, and answers in no order, for claims in memory. Binds: the rows to leave out, the limit, the position
/// behind which to begin (time and number), the event type.
///
/// `NOT IN (SELECT …)` looks each row up in a hash; `<> ALL` would compare it with every row that is left out.
pub(super) fn pending(table: &TableName, of_one_type: bool) -> String {
    let (due, order) = due(of_one_type.then_some("$5"));
    let sql = format!(
        "SELECT * FROM (
             SELECT *, sum(bytes) OVER (ORDER BY {order} ROWS UNBOUNDED PRECEDING) - bytes AS before
             FROM (SELECT {EVENT_COLUMNS}, {PENDING_COLUMNS} FROM {{table}}
                   WHERE {due} AND seq NOT IN (SELECT unnest($1::bigint[]))
                   ORDER BY {order} LIMIT $2) AS due
         ) AS measured
         WHERE before < {MAX_CLAIM_BYTES}"
    );
    fill(&sql, table)
}

/// Leases what is due, and answers in no order. Binds: as [`pending`] up to the position, the lock, the lease in
/// microseconds, whether a suspect may be claimed, the event type.
///
/// A suspect is a row of which a lease was lost before or is lost now; it is claimed alone, and only when it is the
/// first in the order. One that lost too many goes dead instead and is answered as such.
pub(super) fn lease(table: &TableName, of_one_type: bool) -> String {
    let (due, order) = due(of_one_type.then_some("$8"));
    let sql = format!(
        "WITH due AS MATERIALIZED (
             SELECT seq, available_at, locked_at IS NOT NULL OR lease_losses > 0 AS suspect,
                 coalesce(octet_length(payload), octet_length(payload_bytes)) AS bytes
             FROM {{table}}
             WHERE {due}
               AND (locked_at IS NULL OR locked_at <= {{now}} - $6 * interval '1 microsecond')
               AND ($7 OR (locked_at IS NULL AND lease_losses = 0))
               AND seq NOT IN (SELECT unnest($1::bigint[]))
             ORDER BY {order} LIMIT $2
             FOR UPDATE SKIP LOCKED
         ), measured AS (
             SELECT seq, suspect, first_value(suspect) OVER in_order AS suspect_first,
                 row_number() OVER in_order AS place, sum(bytes) OVER in_order - bytes AS before
             FROM due WINDOW in_order AS (ORDER BY available_at, seq ROWS UNBOUNDED PRECEDING)
         )
         UPDATE {{table}} SET
             lease_losses = lease_losses + (locked_at IS NOT NULL)::integer,
             status = CASE WHEN {LOST} THEN 3 ELSE status END,
             done_at = CASE WHEN {LOST} THEN {{now}} END,
             last_error = CASE WHEN {LOST} THEN 'lease_lost: ' || lease_losses + 1 || ' processes that claimed it did not settle it' ELSE last_error END,
             locked_by = CASE WHEN {LOST} THEN NULL ELSE $5 END,
             locked_at = CASE WHEN {LOST} THEN NULL ELSE {{now}} END
         WHERE seq = ANY (ARRAY(
             SELECT seq FROM measured
             WHERE CASE WHEN suspect_first THEN place = 1 ELSE NOT suspect AND before < {MAX_CLAIM_BYTES} END))
         RETURNING {EVENT_COLUMNS}, {PENDING_COLUMNS}"
    );
    fill(&sql, table)
}

/// How long until the first row is due that is not left out. Binds: the rows to leave out, whether a suspect may be
/// claimed, the event type.
pub(super) fn next_due(table: &TableName, mode: Mode, of_one_type: bool) -> String {
    let (of_type, order) = match of_one_type {
        true => ("AND event_type >= $3 AND event_type <= $3", "event_type, available_at, seq"),
        false => ("", "available_at, seq"),
    };
    let free = match mode {
        Mode::SingleNode => "",
        Mode::MultiNode => "AND locked_at IS NULL",
    };
    let sql = format!(
        "SELECT (extract(epoch FROM available_at - {{now}}) * 1000000)::bigint FROM {{table}}
         WHERE status IN (0, 2) {of_type} {free} AND ($2 OR lease_losses = 0)
           AND seq NOT IN (SELECT unnest($1::bigint[]))
         ORDER BY {order} LIMIT 1"
    );
    fill(&sql, table)
}

/// What is due behind the position `$3, $4`, and its order in the index that has it.
///
/// For one event type both name the type as the index does, though that is the same for all rows: an equality would
/// leave the order to any index, and a planner with old statistics takes the one that holds every type.
fn due(event_type: Option<&str>) -> (String, &'static str) {
    match event_type {
        None => (
            "status IN (0, 2) AND available_at <= {now} AND (available_at, seq) > ($3, $4)".to_owned(),
            "available_at, seq",
        ),
        Some(bind) => (
            format!(
                "status IN (0, 2) AND (event_type, available_at) <= ({bind}, {{now}})
                 AND (event_type, available_at, seq) > ({bind}, $3, $4)"
            ),
            "event_type, available_at, seq",
        ),
    }
}

/// A pending row as the claim reads it.
pub(super) struct Pending {
    pub(super) position: Position,
    /// The database's time of its insert.
    pub(super) created_at: DateTime<Utc>,
    /// How often it was tried, and what it is; or why that cannot be told.
    pub(super) event: Result<(u32, Event), String>,
    /// What its payload takes in memory, also when it is no event.
    pub(super) payload_bytes: usize,
    /// Its leases were lost so often that it went dead.
    pub(super) is_dead: bool,
    /// A lease of it was lost before.
    pub(super) is_suspect: bool,
}

impl Pending {
    pub(super) fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        let attempts = row.try_get::<i32, _>(AFTER_EVENT + 1)?;
        let attempts = u32::try_from(attempts).map_err(|_| format!("attempts {attempts} is negative"));
        Ok(Self {
            position: Position { seq: row.try_get(AFTER_EVENT)?, available_at: row.try_get(AFTER_EVENT + 3)? },
            created_at: row.try_get(AFTER_EVENT - 1)?,
            event: attempts.and_then(|attempts| Ok((attempts, read_event(row)?))),
            payload_bytes: row.try_get::<i32, _>(AFTER_EVENT + 2)?.max(0) as usize,
            is_dead: OutboxStatus::of_code(row.try_get::<i16, _>(AFTER_EVENT + 4)?.into()) == OutboxStatus::Dead,
            is_suspect: row.try_get::<i16, _>(AFTER_EVENT + 5)? > 0,
        })
    }
}

/// The answer to [`find`].
pub(super) fn read(row: &PgRow) -> Result<OutboxRow, sqlx::Error> {
    Ok(OutboxRow {
        event: read_event(row).ok(),
        status: OutboxStatus::of_code(row.try_get::<i16, _>(AFTER_EVENT)?.into()),
        attempts: row.try_get::<i32, _>(AFTER_EVENT + 1)?.max(0) as u32,
        available_at: row.try_get(AFTER_EVENT + 2)?,
        created_at: row.try_get(AFTER_EVENT - 1)?,
        done_at: row.try_get(AFTER_EVENT + 3)?,
        last_error: row.try_get(AFTER_EVENT + 4)?,
    })
}

/// Any program may have written the row, so nothing in it is taken for granted.
fn read_event(row: &PgRow) -> Result<Event, String> {
    let text = |column: usize| row.try_get::<Option<String>, _>(column).map_err(|error| error.to_string());
    let time = |column: usize| row.try_get::<Option<DateTime<Utc>>, _>(column).map_err(|error| error.to_string());
    let bytes = row.try_get::<Option<Vec<u8>>, _>(9).map_err(|error| error.to_string())?;
    let occurred_at = match time(12)? {
        Some(occurred_at) => occurred_at,
        None => time(13)?.unwrap_or_default(),
    };
    Event::builder(text(1)?.unwrap_or_default())
        .id(text(0)?)
        .aggregate_type(text(2)?.unwrap_or_default())
        .aggregate_id(text(3)?)
        .tenant_id(text(4)?)
        .source_service(text(5)?)
        .resource_type(text(6)?)
        .operation_type(text(7)?)
        .text(text(8)?)
        .bytes(bytes.map(Bytes::from))
        .content_type(text(10)?)
        .headers(read_headers(text(11)?.as_deref())?)
        .occurred_at(occurred_at)
        .build()
        .map_err(|error| error.to_string())
}
