use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use chrono::SecondsFormat;
use posthaste_core::{Delay, Event, Payload, StoreError};
use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::{OutboxStore, json};
use crate::outbox::{chunks, write_headers};
use crate::sqlite::clock::{modifier, storable};

/// How many rows one statement inserts at most: enough to make its cost small, few enough shapes to keep them prepared.
const CHUNK: usize = 64;

const COLUMNS: &str = "event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service, resource_type, \
     operation_type, payload, payload_bytes, content_type, headers, occurred_at, available_at";

const ROW: &str = "?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, coalesce(?, strftime('%Y-%m-%dT%H:%M:%fZ', 'now', ?))";

/// What the hub's door reads of rows that were there before. Binds: the ids.
const READ_BACK: &str = "SELECT event_id, CAST(event_type AS BLOB), coalesce(payload_bytes, CAST(payload AS BLOB))
     FROM {table} WHERE event_id IN (SELECT value FROM json_each(?))";

/// What became of an event at the hub's door.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ingested {
    /// It is in the outbox now.
    Stored,
    /// The same event was there already: same id, type and payload.
    Known,
    /// Another event has its id; that one stays.
    Conflict,
    /// Nothing is wrong with it, but its atomic batch holds a conflict.
    Withheld,
}

impl OutboxStore {
    /// Stores what is new and says of each event what became of it, in the same order. Committed when it returns; whoever
    /// reads the table is to be woken by who calls.
    pub async fn ingest(&self, events: Vec<Arc<Event>>) -> Result<Vec<Ingested>, StoreError> {
        self.store(events, false).await
    }

    /// As [`ingest`](Self::ingest), but one conflict keeps all of them out.
    pub async fn ingest_atomic(&self, events: Vec<Arc<Event>>) -> Result<Vec<Ingested>, StoreError> {
        self.store(events, true).await
    }

    async fn store(&self, events: Vec<Arc<Event>>, atomic: bool) -> Result<Vec<Ingested>, StoreError> {
        let (store, events) = (self.clone(), Arc::new(events));
        let write = self.0.database.write("store events in the outbox", move |connection| {
            let (store, events) = (store.clone(), events.clone());
            Box::pin(async move { store.store_batch(connection, &events, atomic).await })
        });
        write.await
    }

    pub(in crate::sqlite) async fn store_batch(
        &self,
        connection: &mut SqliteConnection,
        batch: &[Arc<Event>],
        atomic: bool,
    ) -> Result<Vec<Ingested>, sqlx::Error> {
        let mut seen = HashSet::new();
        let mut candidates: Vec<&Event> =
            batch.iter().map(Arc::as_ref).filter(|event| seen.insert(event.id())).collect();
        let mut known = HashMap::new();
        if atomic {
            known = self.read_back(connection, &candidates).await?;
            let mut verdicts = judge(batch, &known);
            if verdicts.contains(&Ingested::Conflict) {
                let stored = verdicts.iter_mut().filter(|verdict| **verdict == Ingested::Stored);
                stored.for_each(|verdict| *verdict = Ingested::Withheld);
                return Ok(verdicts);
            }
            candidates.retain(|event| !known.contains_key(event.id()));
        }
        let after = "ON CONFLICT (event_id) DO NOTHING RETURNING event_id";
        let returned = self.insert_rows(connection, &candidates, None, after).await?;
        let stored = returned.iter().map(|row| row.try_get(0)).collect::<Result<HashSet<String>, _>>()?;
        candidates.retain(|event| !stored.contains(event.id()));
        known.extend(self.read_back(connection, &candidates).await?);
        Ok(judge(batch, &known))
    }

    async fn read_back(
        &self,
        connection: &mut SqliteConnection,
        events: &[&Event],
    ) -> Result<HashMap<String, Identity>, sqlx::Error> {
        if events.is_empty() {
            return Ok(HashMap::new());
        }
        let ids: Vec<&str> = events.iter().map(|event| event.id()).collect();
        let rows = sqlx::query(self.sql(READ_BACK)).bind(json(&ids)?).fetch_all(connection).await?;
        let identity =
            |row: &SqliteRow| Ok((row.try_get(0)?, Identity { event_type: row.try_get(1)?, payload: row.try_get(2)? }));
        rows.iter().map(identity).collect()
    }

    pub(super) async fn insert_all(
        &self,
        connection: &mut SqliteConnection,
        events: &[&Event],
        claim_id: Option<&str>,
    ) -> Result<Vec<i64>, sqlx::Error> {
        let rows = self.insert_rows(connection, events, claim_id, "RETURNING seq").await?;
        let mut numbers = rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<i64>, _>>()?;
        // They are given in the order of the events, though they need not be answered so.
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Inserts in order, many rows to a statement, and answers with what the clause `after` returns.
    async fn insert_rows(
        &self,
        connection: &mut SqliteConnection,
        events: &[&Event],
        claim_id: Option<&str>,
        after: &'static str,
    ) -> Result<Vec<SqliteRow>, sqlx::Error> {
        let (columns, row) = match claim_id {
            Some(_) => (format!("{COLUMNS}, locked_by, locked_at"), format!("({ROW}, ?, {{now}})")),
            None => (COLUMNS.to_owned(), format!("({ROW})")),
        };
        let mut returned = Vec::new();
        for chunk in chunks(events).flat_map(|part| part.chunks(CHUNK)) {
            let rows = vec![row.as_str(); chunk.len()].join(", ");
            let sql = self.sql(&format!("INSERT INTO {{table}} ({columns}) VALUES {rows} {after}"));
            returned.extend(insert_chunk(connection, sql, chunk, claim_id).await?);
        }
        Ok(returned)
    }
}

async fn insert_chunk(
    connection: &mut SqliteConnection,
    sql: AssertSqlSafe<String>,
    chunk: &[&Event],
    claim_id: Option<&str>,
) -> Result<Vec<SqliteRow>, sqlx::Error> {
    let mut query = sqlx::query(sql);
    for event in chunk {
        let (text, bytes) = match event.payload() {
            Payload::Text(text) => (Some(text.as_str()), None),
            Payload::Bytes(bytes) => (None, Some(&bytes[..])),
        };
        let (until, wait) = match event.delay() {
            Delay::None => (None, "+0 seconds".to_owned()),
            Delay::Until(at) => {
                (Some(storable(at).to_rfc3339_opts(SecondsFormat::Millis, true)), "+0 seconds".to_owned())
            }
            Delay::For(wait) => (None, modifier(wait)),
        };
        query = query
            .bind(event.id())
            .bind(event.event_type())
            .bind(event.aggregate_type())
            .bind(event.aggregate_id())
            .bind(event.tenant_id())
            .bind(event.source_service())
            .bind(event.resource_type())
            .bind(event.operation_type())
            .bind(text)
            .bind(bytes)
            .bind(event.content_type())
            .bind(write_headers(event.headers()))
            .bind(storable(event.occurred_at()).to_rfc3339_opts(SecondsFormat::AutoSi, true))
            .bind(until)
            .bind(wait);
        if let Some(claim_id) = claim_id {
            query = query.bind(claim_id);
        }
    }
    query.fetch_all(connection).await
}

/// What makes two events with one id the same.
struct Identity {
    /// As bytes: a foreign row's may be no UTF-8, which is no reason to refuse the whole batch.
    event_type: Vec<u8>,
    payload: Vec<u8>,
}

/// `known` are the rows that stood before the batch.
fn judge(batch: &[Arc<Event>], known: &HashMap<String, Identity>) -> Vec<Ingested> {
    let mut firsts: HashMap<&str, &Event> = HashMap::new();
    let mut verdicts = Vec::with_capacity(batch.len());
    for event in batch {
        let (event_type, payload) = (event.event_type(), event.payload().as_bytes());
        let is_same = match (known.get(event.id()), firsts.get(event.id())) {
            (Some(row), _) => Some(row.event_type == event_type.as_bytes() && row.payload == payload),
            (None, Some(first)) => Some(first.event_type() == event_type && first.payload().as_bytes() == payload),
            (None, None) => None,
        };
        verdicts.push(match is_same {
            None => Ingested::Stored,
            Some(true) => Ingested::Known,
            Some(false) => Ingested::Conflict,
        });
        firsts.entry(event.id()).or_insert(event);
    }
    verdicts
}
