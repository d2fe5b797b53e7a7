use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use chrono::{DateTime, SecondsFormat, Utc};
use posthaste_core::{Delay, Event, Payload, StoreError};
use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::{Outbox, fill};
use crate::TableName;
use crate::outbox::write_headers;
use crate::sqlite::clock::modifier;
use crate::sqlite::database::store_error;

/// How many rows one statement inserts: enough to make its cost small, few enough shapes to keep them prepared.
const CHUNK: usize = 64;

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

impl Outbox {
    /// Writes an event in the caller's transaction and answers with its id.
    ///
    /// It is delivered once the transaction has committed, and never if it does not. The commit cannot be seen from
    /// here: the source looks a few times within the next moments, and at once after [`committed`](Self::committed).
    pub async fn write(&self, connection: &mut SqliteConnection, event: &Event) -> Result<String, StoreError> {
        insert(connection, &self.0.table, &[event], "").await.map_err(write_failed)?;
        self.wake_soon([event]);
        Ok(event.id().to_owned())
    }

    /// Writes events in the caller's transaction, in this order, and answers with their ids. See [`write`](Self::write).
    pub async fn write_all(
        &self,
        connection: &mut SqliteConnection,
        events: &[Event],
    ) -> Result<Vec<String>, StoreError> {
        let all: Vec<&Event> = events.iter().collect();
        insert(connection, &self.0.table, &all, "").await.map_err(write_failed)?;
        self.wake_soon(events);
        Ok(events.iter().map(|event| event.id().to_owned()).collect())
    }

    fn wake_soon<'a>(&self, events: impl IntoIterator<Item = &'a Event>) {
        for event_type in events.into_iter().map(Event::event_type).collect::<BTreeSet<_>>() {
            if let Some(lane) = self.lane_of(event_type) {
                lane.wakeup.wake_soon();
            }
        }
    }

    /// Stores what is new and says of each event what became of it, in the same order. Committed when it returns.
    pub async fn ingest(&self, events: Vec<Arc<Event>>) -> Result<Vec<Ingested>, StoreError> {
        self.store(events, false).await
    }

    /// As [`ingest`](Self::ingest), but one conflict keeps all of them out.
    pub async fn ingest_atomic(&self, events: Vec<Arc<Event>>) -> Result<Vec<Ingested>, StoreError> {
        self.store(events, true).await
    }

    async fn store(&self, events: Vec<Arc<Event>>, atomic: bool) -> Result<Vec<Ingested>, StoreError> {
        let (table, events) = (self.0.table.clone(), Arc::new(events));
        let batch = events.clone();
        let store = self.0.database.write("store events in the outbox", move |connection| {
            let (table, batch) = (table.clone(), batch.clone());
            Box::pin(async move { store_batch(connection, &table, &batch, atomic).await })
        });
        let ingested = store.await?;
        let stored = events.iter().zip(&ingested).filter(|(_, ingested)| **ingested == Ingested::Stored);
        let types: BTreeSet<&str> = stored.map(|(event, _)| event.event_type()).collect();
        types.into_iter().for_each(|event_type| self.wake(event_type));
        Ok(ingested)
    }
}

async fn store_batch(
    connection: &mut SqliteConnection,
    table: &TableName,
    batch: &[Arc<Event>],
    atomic: bool,
) -> Result<Vec<Ingested>, sqlx::Error> {
    let mut seen = HashSet::new();
    let mut candidates: Vec<&Event> = batch.iter().map(Arc::as_ref).filter(|event| seen.insert(event.id())).collect();
    let mut known = HashMap::new();
    if atomic {
        known = read_back(connection, table, &candidates).await?;
        let mut verdicts = judge(batch, &known);
        if verdicts.contains(&Ingested::Conflict) {
            let stored = verdicts.iter_mut().filter(|verdict| **verdict == Ingested::Stored);
            stored.for_each(|verdict| *verdict = Ingested::Withheld);
            return Ok(verdicts);
        }
        candidates.retain(|event| !known.contains_key(event.id()));
    }
    let returned =
        insert(connection, table, &candidates, "ON CONFLICT (event_id) DO NOTHING RETURNING event_id").await?;
    let stored = returned.iter().map(|row| row.try_get(0)).collect::<Result<HashSet<String>, _>>()?;
    candidates.retain(|event| !stored.contains(event.id()));
    known.extend(read_back(connection, table, &candidates).await?);
    Ok(judge(batch, &known))
}

/// What makes two events with one id the same.
struct Identity {
    /// As bytes: a foreign row's may be no UTF-8, which is no reason to refuse the whole batch.
    event_type: Vec<u8>,
    payload: Vec<u8>,
}

async fn read_back(
    connection: &mut SqliteConnection,
    table: &TableName,
    events: &[&Event],
) -> Result<HashMap<String, Identity>, sqlx::Error> {
    if events.is_empty() {
        return Ok(HashMap::new());
    }
    let ids: Vec<&str> = events.iter().map(|event| event.id()).collect();
    let ids = serde_json::to_string(&ids).map_err(|error| sqlx::Error::Encode(error.into()))?;
    let sql = "SELECT event_id, CAST(event_type AS BLOB), coalesce(payload_bytes, CAST(payload AS BLOB))
               FROM {table} WHERE event_id IN (SELECT value FROM json_each(?))";
    let rows = sqlx::query(AssertSqlSafe(fill(sql, table))).bind(ids).fetch_all(connection).await?;
    let identity =
        |row: &SqliteRow| Ok((row.try_get(0)?, Identity { event_type: row.try_get(1)?, payload: row.try_get(2)? }));
    rows.iter().map(identity).collect()
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

/// Inserts in order, many rows to a statement, and answers with what the clause `after` returns.
async fn insert(
    connection: &mut SqliteConnection,
    table: &TableName,
    events: &[&Event],
    after: &'static str,
) -> Result<Vec<SqliteRow>, sqlx::Error> {
    const ROW: &str = "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, coalesce(?, strftime('%Y-%m-%dT%H:%M:%fZ', 'now', ?)))";
    let mut returned = Vec::new();
    for chunk in events.chunks(CHUNK) {
        let rows = vec![ROW; chunk.len()].join(", ");
        let mut query = sqlx::query(AssertSqlSafe(format!(
            "INSERT INTO {table} (event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service,
                 resource_type, operation_type, payload, payload_bytes, content_type, headers, occurred_at, available_at)
             VALUES {rows} {after}"
        )));
        for event in chunk {
            let (text, bytes) = match event.payload() {
                Payload::Text(text) => (Some(text.as_str()), None),
                Payload::Bytes(bytes) => (None, Some(&bytes[..])),
            };
            let (until, wait) = match event.delay() {
                Delay::None => (None, "+0 seconds".to_owned()),
                Delay::Until(at) => (Some(time_text(at)), "+0 seconds".to_owned()),
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
                .bind(event.occurred_at().to_rfc3339_opts(SecondsFormat::AutoSi, true))
                .bind(until)
                .bind(wait);
        }
        returned.extend(query.fetch_all(&mut *connection).await?);
    }
    Ok(returned)
}

/// SQLite knows no time after the year 9999.
fn time_text(at: DateTime<Utc>) -> String {
    const LAST: i64 = 253_402_300_799_999;
    let at = DateTime::from_timestamp_millis(at.timestamp_millis().min(LAST)).unwrap_or(at);
    at.to_rfc3339_opts(SecondsFormat::Millis, true)
}

fn write_failed(error: sqlx::Error) -> StoreError {
    store_error("write to the outbox", error)
}
