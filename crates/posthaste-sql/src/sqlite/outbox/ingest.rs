use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use posthaste_core::hub_store::{EventIdentity, Ingested, deduplicate, deduplicate_atomic};
use posthaste_core::{Event, StoreError};
use sqlx::sqlite::SqliteRow;
use sqlx::{Row, SqliteConnection};

use super::OutboxStore;
use crate::sqlite::json::json;

/// Reads the id, type and payload of those events that are in the table already. Binds: the ids.
const READ_BACK: &str = "SELECT event_id, CAST(event_type AS BLOB), coalesce(payload_bytes, CAST(payload AS BLOB))
     FROM {table} WHERE event_id IN (SELECT value FROM json_each(?))";

impl OutboxStore {
    /// Stores new events and returns the result for each event, in the same order. The transaction has committed when
    /// this returns. The caller wakes the sources of the table.
    pub async fn ingest(&self, events: Vec<Arc<Event>>) -> Result<Vec<Ingested>, StoreError> {
        let write =
            self.0.database.write_with("store events in the outbox", (self.clone(), events), |connection, job| {
                Box::pin(async move { job.0.store_batch(connection, &job.1, false).await })
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
            let results = deduplicate_atomic(batch, &known);
            if results.contains(&Ingested::Conflict) {
                return Ok(results);
            }
            candidates.retain(|event| !known.contains_key(event.id()));
        }
        let after = "ON CONFLICT (event_id) DO NOTHING RETURNING event_id";
        let returned = self.insert_rows(connection, &candidates, None, after).await?;
        let stored = returned.iter().map(|row| row.try_get(0)).collect::<Result<HashSet<String>, _>>()?;
        candidates.retain(|event| !stored.contains(event.id()));
        known.extend(self.read_back(connection, &candidates).await?);
        Ok(deduplicate(batch, &known))
    }

    async fn read_back(
        &self,
        connection: &mut SqliteConnection,
        events: &[&Event],
    ) -> Result<HashMap<String, EventIdentity>, sqlx::Error> {
        if events.is_empty() {
            return Ok(HashMap::new());
        }
        let ids: Vec<&str> = events.iter().map(|event| event.id()).collect();
        let rows = sqlx::query(self.sql(READ_BACK)).bind(json(&ids)?).fetch_all(connection).await?;
        let identity = |row: &SqliteRow| {
            Ok((row.try_get(0)?, EventIdentity { event_type: row.try_get(1)?, payload: row.try_get(2)? }))
        };
        rows.iter().map(identity).collect()
    }
}
