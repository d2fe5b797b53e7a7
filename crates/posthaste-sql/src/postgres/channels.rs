use std::sync::Arc;

use async_trait::async_trait;
use posthaste_core::hub_store::{Admission, ChannelStore, Ingested, RecordedChannel, Refusal, TopicOwners};
use posthaste_core::{Event, StoreError};
use sqlx::{PgConnection, Row};

use super::database::Database;
use super::log::{STATEMENT_TIMEOUT, WRITE, limited};
use super::outbox::OutboxStore;
use crate::channels::{Batch, ChannelStatements};
use crate::session::Failed;
use crate::unreadable::readable;

const LOAD: &str = "SELECT event_type, paused_at IS NOT NULL, topic_key FROM channel ORDER BY created_at, topic_key";

/// Binds: the topic keys.
const OWNERS: &str = "SELECT topic_key, event_type FROM channel WHERE topic_key = ANY ($1)";

const COUNT: &str = "SELECT count(*) FROM channel";

/// Channels are recorded by one process at a time, so that two of them neither give one topic to two types nor exceed the
/// limit together. Only the first event of a type needs this lock, and it ends with the transaction.
const LOCK_CHANNELS: &str = "SELECT pg_advisory_xact_lock(hashtext('posthaste record channels'))";

/// Binds: the topic keys, the event types.
const RECORD: &str = "INSERT INTO channel (topic_key, event_type)
     SELECT topic_key, event_type FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS new (topic_key, event_type, place)
     ORDER BY place";

/// Keeps the time of the first pause. Binds: the event type, true to pause.
const SET_PAUSED: &str = "UPDATE channel SET paused_at = CASE WHEN $2 THEN coalesce(paused_at, clock_timestamp()) END
     WHERE event_type = $1 RETURNING event_type";

/// The event types with these topic keys that have unfinished rows, including rows that are not due. A loose index scan:
/// one seek per type. Binds: the topic keys.
pub(super) const UNFINISHED_TYPES: &str = "WITH RECURSIVE kind AS (
         (SELECT event_type FROM {table} WHERE status IN (0, 2) ORDER BY event_type, available_at, seq LIMIT 1)
         UNION ALL
         SELECT next.event_type FROM kind CROSS JOIN LATERAL (
             SELECT event_type FROM {table} WHERE status IN (0, 2) AND event_type > kind.event_type
             ORDER BY event_type, available_at, seq LIMIT 1
         ) AS next
     )
     SELECT event_type FROM kind WHERE replace(event_type, '.', '_') = ANY ($1)";

/// The channels of the hub, in the table `channel`. The outbox table in the same database has their events.
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
        let rows = self.database.read("read the channels", sqlx::query(LOAD)).await?;
        let channels = readable("channel", &rows, 2, |row| {
            Ok(RecordedChannel { event_type: row.try_get(0)?, is_paused: row.try_get(1)? })
        });
        self.owners.remember_types(channels.iter().map(|channel| channel.event_type.as_str()));
        Ok(channels)
    }

    async fn set_paused(&self, event_type: &str, is_paused: bool) -> Result<bool, StoreError> {
        let statement = sqlx::query(SET_PAUSED).bind(event_type).bind(is_paused);
        Ok(!self.database.write("pause or resume a channel", statement).await?.is_empty())
    }

    async fn record(&self, event_types: Vec<String>) -> Result<Vec<Result<(), Refusal>>, StoreError> {
        let owners = self.owners.of_batch(event_types.iter().map(String::as_str));
        let record = async {
            let mut work = self.database.pipeline().begin(WRITE).await?;
            let statements = Statements { connection: &mut work, outbox: &self.outbox };
            let recorded = Batch::new(statements, owners).record(&event_types).await?;
            work.commit().await?;
            Ok::<_, Failed>(recorded)
        };
        let (results, owners) = limited("record channels", STATEMENT_TIMEOUT, record).await?;
        self.owners.remember(owners);
        Ok(results)
    }

    async fn ingest(&self, events: Vec<Arc<Event>>, atomic: bool) -> Result<Vec<Admission>, StoreError> {
        let owners = self.owners.of_batch(events.iter().map(|event| event.event_type()));
        let ingest = async {
            let mut work = self.database.pipeline().begin(WRITE).await?;
            let statements = Statements { connection: &mut work, outbox: &self.outbox };
            let ingested = Batch::new(statements, owners).ingest(&events, atomic).await?;
            work.commit().await?;
            Ok::<_, Failed>(ingested)
        };
        let (results, owners) = limited("store events in the outbox", STATEMENT_TIMEOUT, ingest).await?;
        self.owners.remember(owners);
        Ok(results)
    }
}

/// The statements of one transaction.
struct Statements<'a> {
    connection: &'a mut PgConnection,
    outbox: &'a OutboxStore,
}

#[async_trait]
impl ChannelStatements for Statements<'_> {
    async fn owners(&mut self, topic_keys: &[String]) -> Result<(Vec<(String, String)>, i64), sqlx::Error> {
        let recorded = sqlx::query_as(OWNERS).bind(topic_keys).fetch_all(&mut *self.connection).await?;
        Ok((recorded, sqlx::query_scalar(COUNT).fetch_one(&mut *self.connection).await?))
    }

    async fn lock(&mut self) -> Result<bool, sqlx::Error> {
        sqlx::query(LOCK_CHANNELS).execute(&mut *self.connection).await.map(|_| true)
    }

    async fn unfinished_types(&mut self, topic_keys: &[String]) -> Result<Vec<String>, sqlx::Error> {
        let unfinished = sqlx::query_scalar(self.outbox.sql(UNFINISHED_TYPES)).bind(topic_keys);
        unfinished.fetch_all(&mut *self.connection).await
    }

    async fn record(&mut self, channels: Vec<(String, String)>) -> Result<(), sqlx::Error> {
        let (keys, types): (Vec<String>, Vec<String>) = channels.into_iter().unzip();
        sqlx::query(RECORD).bind(keys).bind(types).execute(&mut *self.connection).await.map(|_| ())
    }

    async fn store(&mut self, events: &[Arc<Event>], atomic: bool) -> Result<Vec<Ingested>, sqlx::Error> {
        self.outbox.store_batch(self.connection, events, atomic).await
    }
}
