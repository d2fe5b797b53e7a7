use std::sync::Arc;

use async_trait::async_trait;
use posthaste_core::hub_store::{Admission, ChannelStore, Ingested, RecordedChannel, Refusal, TopicOwners};
use posthaste_core::outbox::Store;
use posthaste_core::{Event, StoreError};
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::database::Database;
use super::errors::doing;
use super::json::json;
use super::outbox::{OutboxStore, fill};
use crate::channels::{Batch, ChannelStatements};
use crate::unreadable::readable;

const LOAD: &str = "SELECT event_type, paused_at IS NOT NULL, topic_key FROM channel ORDER BY created_at, topic_key";

const OWNERS: &str = "SELECT topic_key, event_type FROM channel WHERE topic_key IN (SELECT value FROM json_each(?))";

const COUNT: &str = "SELECT count(*) FROM channel";

const RECORD: &str = "INSERT INTO channel (topic_key, event_type) VALUES (?, ?)";

/// Keeps the time of the first pause. Binds: the event type, true to pause.
const SET_PAUSED: &str = "UPDATE channel
     SET paused_at = CASE WHEN ?2 THEN coalesce(paused_at, CAST(round(unixepoch('subsec') * 1000) AS INTEGER)) END
     WHERE event_type = ?1";

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
    async fn load(&self) -> Result<Vec<RecordedChannel>, StoreError> {
        let rows = doing("read the channels", sqlx::query(LOAD).fetch_all(self.database.readers())).await?;
        let channels = readable("channel", &rows, 2, |row| {
            Ok(RecordedChannel { event_type: row.try_get(0)?, is_paused: row.try_get(1)? })
        });
        self.owners.remember_types(channels.iter().map(|channel| channel.event_type.as_str()));
        Ok(channels)
    }

    async fn set_paused(&self, event_type: &str, is_paused: bool) -> Result<bool, StoreError> {
        let event_type = event_type.to_owned();
        let write = self.database.write("pause or resume a channel", move |connection| {
            let statement = sqlx::query(SET_PAUSED).bind(event_type.clone()).bind(is_paused);
            Box::pin(async move { Ok(statement.execute(connection).await?.rows_affected() > 0) })
        });
        write.await
    }

    async fn record(&self, event_types: Vec<String>) -> Result<Vec<Result<(), Refusal>>, StoreError> {
        let owners = self.owners.of_batch(event_types.iter().map(String::as_str));
        let arguments = (self.outbox.clone(), owners, event_types);
        let write = self.database.write_with("record channels", arguments, |connection, arguments| {
            Box::pin(async move {
                let (outbox, owners, event_types) = &*arguments;
                Batch::new(Statements { connection, outbox }, owners.clone()).record(event_types).await
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
                Batch::new(Statements { connection, outbox }, owners.clone()).ingest(events, atomic).await
            })
        });
        let (results, owners) = write.await?;
        self.owners.remember(owners);
        Ok(results)
    }
}

/// The statements of one transaction.
struct Statements<'a> {
    connection: &'a mut SqliteConnection,
    outbox: &'a OutboxStore,
}

#[async_trait]
impl ChannelStatements for Statements<'_> {
    async fn owners(&mut self, topic_keys: &[String]) -> Result<(Vec<(String, String)>, i64), sqlx::Error> {
        let recorded = sqlx::query_as(OWNERS).bind(json(topic_keys)?).fetch_all(&mut *self.connection).await?;
        Ok((recorded, sqlx::query_scalar(COUNT).fetch_one(&mut *self.connection).await?))
    }

    /// SQLite has one writer.
    async fn lock(&mut self) -> Result<bool, sqlx::Error> {
        Ok(false)
    }

    async fn unfinished_types(&mut self, topic_keys: &[String]) -> Result<Vec<String>, sqlx::Error> {
        let sql = AssertSqlSafe(fill(UNFINISHED_TYPES, self.outbox.table(), self.outbox.mode()));
        sqlx::query_scalar(sql).bind(json(topic_keys)?).fetch_all(&mut *self.connection).await
    }

    async fn record(&mut self, channels: Vec<(String, String)>) -> Result<(), sqlx::Error> {
        for (key, event_type) in channels {
            sqlx::query(RECORD).bind(key).bind(event_type).execute(&mut *self.connection).await?;
        }
        Ok(())
    }

    async fn store(&mut self, events: &[Arc<Event>], atomic: bool) -> Result<Vec<Ingested>, sqlx::Error> {
        self.outbox.store_batch(self.connection, events, atomic).await
    }
}
