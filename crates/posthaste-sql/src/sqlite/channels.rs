use std::sync::Arc;

use async_trait::async_trait;
use posthaste_core::hub_store::{Admission, BatchOwners, ChannelStore, Ingested, Refusal, TopicOwners};
use posthaste_core::outbox::Store;
use posthaste_core::{Event, StoreError};
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::database::Database;
use super::errors::doing;
use super::json::json;
use super::outbox::{OutboxStore, fill};
use crate::unreadable::readable;

const LOAD: &str = "SELECT event_type, topic_key FROM channel ORDER BY created_at, topic_key";

const OWNERS: &str = "SELECT topic_key, event_type FROM channel WHERE topic_key IN (SELECT value FROM json_each(?))";

const COUNT: &str = "SELECT count(*) FROM channel";

const RECORD: &str = "INSERT INTO channel (topic_key, event_type) VALUES (?, ?)";

/// Every event type with unfinished rows, including rows that are not due. A loose index scan: one seek per type.
const UNFINISHED_TYPES: &str = "WITH RECURSIVE kind (event_type) AS (
         SELECT min(event_type) FROM {table} INDEXED BY {table}_pending_of_type WHERE status IN (0, 2)
         UNION ALL
         SELECT (SELECT min(event_type) FROM {table} INDEXED BY {table}_pending_of_type
                 WHERE status IN (0, 2) AND event_type > kind.event_type)
         FROM kind WHERE kind.event_type IS NOT NULL
     )
     SELECT event_type FROM kind WHERE typeof(event_type) = 'text'
       AND replace(event_type, '.', '_') IN (SELECT value FROM json_each(?))";

/// The channels of the hub, in the table `channel`. The outbox table in the same file has their events.
#[derive(Clone)]
pub struct ChannelTable {
    database: Database,
    outbox: OutboxStore,
    owners: Arc<TopicOwners>,
}

impl ChannelTable {
    /// The channels of this outbox, at most `limit` of them. The hub tables of the database must be up to date.
    pub fn new(database: Database, outbox: OutboxStore, limit: usize) -> Self {
        Self { database, outbox, owners: Arc::new(TopicOwners::new(limit)) }
    }
}

#[async_trait]
impl ChannelStore for ChannelTable {
    async fn load(&self) -> Result<Vec<String>, StoreError> {
        let rows = doing("read the channels", sqlx::query(LOAD).fetch_all(self.database.readers())).await?;
        let types = readable("channel", &rows, 1, |row| row.try_get::<String, _>(0));
        self.owners.remember_types(&types);
        Ok(types)
    }

    async fn record(&self, event_types: Vec<String>) -> Result<Vec<Result<(), Refusal>>, StoreError> {
        let owners = self.owners.of_batch(event_types.iter().map(String::as_str));
        let arguments = (self.outbox.clone(), owners, event_types);
        let write = self.database.write_with("record channels", arguments, |connection, arguments| {
            Box::pin(async move {
                let (outbox, owners, event_types) = &*arguments;
                let mut batch = Batch { connection, outbox, owners: owners.clone() };
                let results = batch.record(event_types).await?;
                Ok((results, batch.owners))
            })
        });
        let (results, owners) = write.await?;
        self.owners.remember(owners);
        Ok(results)
    }

    async fn ingest(&self, events: Vec<Arc<Event>>, atomic: bool) -> Result<Vec<Admission>, StoreError> {
        let owners = self.owners.of_batch(events.iter().map(|event| event.event_type()));
        let arguments = (self.outbox.clone(), owners, events);
        let write = self.database.write_with("store events in the outbox", arguments, move |connection, arguments| {
            Box::pin(async move {
                let (outbox, owners, events) = &*arguments;
                let mut batch = Batch { connection, outbox, owners: owners.clone() };
                let results = match atomic {
                    true => batch.ingest_atomic(events).await?,
                    false => batch.ingest_each(events).await?,
                };
                Ok((results, batch.owners))
            })
        });
        let (results, owners) = write.await?;
        self.owners.remember(owners);
        Ok(results)
    }
}

/// One transaction that records channels.
struct Batch<'a> {
    connection: &'a mut SqliteConnection,
    outbox: &'a OutboxStore,
    owners: BatchOwners,
}

impl Batch<'_> {
    async fn record(&mut self, event_types: &[String]) -> Result<Vec<Result<(), Refusal>>, sqlx::Error> {
        self.read_owners().await?;
        let mut results = Vec::with_capacity(event_types.len());
        for event_type in event_types {
            let result = self.owners.check(event_type);
            if result.is_ok() {
                self.record_type(event_type).await?;
            }
            results.push(result);
        }
        Ok(results)
    }

    async fn ingest_each(&mut self, events: &[Arc<Event>]) -> Result<Vec<Admission>, sqlx::Error> {
        self.read_owners().await?;
        let mut results = Vec::with_capacity(events.len());
        let mut rest = events;
        while !rest.is_empty() {
            let (part, later) = rest.split_at(self.owners.independent(rest));
            results.extend(self.store(part, self.owners.refusals(part), false).await?);
            rest = later;
        }
        Ok(results)
    }

    async fn ingest_atomic(&mut self, events: &[Arc<Event>]) -> Result<Vec<Admission>, sqlx::Error> {
        self.read_owners().await?;
        let refusals = self.owners.refusals_of_atomic(events);
        match refusals.iter().any(Option::is_some) {
            true => Ok(Admission::merge(refusals, [])),
            false => self.store(events, refusals, true).await,
        }
    }

    /// Stores the events that are not refused, and records the types of those that were stored.
    async fn store(
        &mut self,
        events: &[Arc<Event>],
        refusals: Vec<Option<Refusal>>,
        atomic: bool,
    ) -> Result<Vec<Admission>, sqlx::Error> {
        let admitted = events.iter().zip(&refusals).filter(|(_, refusal)| refusal.is_none());
        let admitted: Vec<Arc<Event>> = admitted.map(|(event, _)| event.clone()).collect();
        let ingested = self.outbox.store_batch(self.connection, &admitted, atomic).await?;
        for (event, ingested) in admitted.iter().zip(&ingested) {
            if *ingested == Ingested::Stored {
                self.record_type(event.event_type()).await?;
            }
        }
        Ok(Admission::merge(refusals, ingested))
    }

    /// Reads the owners that are not in the cache. A type with pending rows of other programs owns its topic from now
    /// on.
    async fn read_owners(&mut self) -> Result<(), sqlx::Error> {
        if self.owners.unknown().is_empty() {
            return Ok(());
        }
        let unknown = json(self.owners.unknown())?;
        let recorded: Vec<(String, String)> =
            sqlx::query_as(OWNERS).bind(unknown.as_str()).fetch_all(&mut *self.connection).await?;
        let count: i64 = sqlx::query_scalar(COUNT).fetch_one(&mut *self.connection).await?;
        self.owners.add_recorded(recorded, usize::try_from(count).unwrap_or_default());
        if self.owners.are_complete() {
            return Ok(());
        }
        let unfinished = AssertSqlSafe(fill(UNFINISHED_TYPES, self.outbox.table(), self.outbox.mode()));
        let pending: Vec<String> =
            sqlx::query_scalar(unfinished).bind(unknown).fetch_all(&mut *self.connection).await?;
        for event_type in pending {
            if self.owners.check(&event_type).is_ok() {
                self.record_type(&event_type).await?;
            }
        }
        Ok(())
    }

    /// Records that the type owns its topic, unless the topic has an owner already.
    async fn record_type(&mut self, event_type: &str) -> Result<(), sqlx::Error> {
        let Some(key) = self.owners.unrecorded_key(event_type) else { return Ok(()) };
        sqlx::query(RECORD).bind(key.as_str()).bind(event_type).execute(&mut *self.connection).await?;
        self.owners.recorded(key, event_type);
        Ok(())
    }
}
