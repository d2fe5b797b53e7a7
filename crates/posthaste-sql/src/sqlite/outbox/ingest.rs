use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use posthaste_core::{Event, StoreError};
use sqlx::sqlite::SqliteRow;
use sqlx::{Row, SqliteConnection};

use super::{OutboxStore, json};

/// Reads the id, type and payload of those events that are in the table already. Binds: the ids.
const READ_BACK: &str = "SELECT event_id, CAST(event_type AS BLOB), coalesce(payload_bytes, CAST(payload AS BLOB))
     FROM {table} WHERE event_id IN (SELECT value FROM json_each(?))";

/// The result for one ingested event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ingested {
    /// It is in the outbox now.
    Stored,
    /// The same event was there already: same id, type and payload.
    Known,
    /// Another event with the same id was there already, and stays.
    Conflict,
    /// The event is valid but not stored, because another event of its atomic batch conflicts.
    Withheld,
}

impl OutboxStore {
    /// Stores new events and returns the result for each event, in the same order. The transaction has committed when
    /// this returns. The caller wakes the sources of the table.
    pub async fn ingest(&self, events: Vec<Arc<Event>>) -> Result<Vec<Ingested>, StoreError> {
        self.store(events, false).await
    }

    /// As [`ingest`](Self::ingest), but stores nothing if one event conflicts.
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
}

/// Two events with the same id are the same if these are equal.
struct Identity {
    /// As bytes, because another program may have written a type that is not UTF-8. That must not fail the whole batch.
    event_type: Vec<u8>,
    payload: Vec<u8>,
}

/// The result for each event of a batch. `known` are the rows that were in the table before the batch.
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
