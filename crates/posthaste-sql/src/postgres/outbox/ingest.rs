use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use posthaste_core::Event;
use posthaste_core::hub_store::{EventIdentity, Ingested, deduplicate, deduplicate_atomic};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

use super::OutboxStore;
use super::write::insert_new;
use crate::outbox::chunks;

/// Reads the id, type and payload of those events that are in the table already. Binds: the ids.
///
/// The cast of a text to bytes would read backslashes as escapes, and a conversion would have to name the encoding.
pub(in crate::postgres) const READ_BACK: &str = "SELECT event_id, event_type, payload, payload_bytes FROM {table}
     WHERE event_id = ANY ($1)";

/// Before an atomic batch is stored.
const SAVE: &str = "SAVEPOINT batch";
/// After a conflict in an atomic batch.
const UNDO: &str = "ROLLBACK TO SAVEPOINT batch";

impl OutboxStore {
    /// Stores new events in this transaction, and returns the result for each event, in the same order. An `atomic` batch
    /// with a conflict stores nothing.
    ///
    /// The transaction must read what others have committed (READ COMMITTED): an id that another process inserts at the
    /// same time is found after that process has committed.
    pub(in crate::postgres) async fn store_batch(
        &self,
        connection: &mut PgConnection,
        batch: &[Arc<Event>],
        atomic: bool,
    ) -> Result<Vec<Ingested>, sqlx::Error> {
        if atomic {
            sqlx::raw_sql(SAVE).execute(&mut *connection).await?;
        }
        let mut seen = HashSet::new();
        let mut candidates: Vec<&Event> =
            batch.iter().map(Arc::as_ref).filter(|event| seen.insert(event.id())).collect();
        let (sql, mut stored) = (insert_new(), HashSet::new());
        for chunk in chunks(&candidates, |event| event.weight()) {
            for row in &self.insert_chunk(connection, &sql, chunk, None).await? {
                stored.insert(row.try_get::<String, _>(0)?);
            }
        }
        candidates.retain(|event| !stored.contains(event.id()));
        let known = self.read_back(connection, &candidates).await?;
        if !atomic {
            return Ok(deduplicate(batch, &known));
        }
        let results = deduplicate_atomic(batch, &known);
        if results.contains(&Ingested::Conflict) {
            sqlx::raw_sql(UNDO).execute(connection).await?;
        }
        Ok(results)
    }

    async fn read_back(
        &self,
        connection: &mut PgConnection,
        events: &[&Event],
    ) -> Result<HashMap<String, EventIdentity>, sqlx::Error> {
        if events.is_empty() {
            return Ok(HashMap::new());
        }
        let ids: Vec<&str> = events.iter().map(|event| event.id()).collect();
        let rows = sqlx::query(self.sql(READ_BACK)).bind(ids).fetch_all(connection).await?;
        let identity = |row: &PgRow| {
            let text: Option<String> = row.try_get(2)?;
            let bytes: Option<Vec<u8>> = row.try_get(3)?;
            let payload = bytes.or(text.map(String::into_bytes)).unwrap_or_default();
            Ok((row.try_get(0)?, EventIdentity { event_type: row.try_get::<String, _>(1)?.into_bytes(), payload }))
        };
        rows.iter().map(identity).collect()
    }
}
