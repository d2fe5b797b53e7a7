use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use posthaste_core::outbox::Store;
use posthaste_core::{Event, StoreError};
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::database::Database;
use super::errors::store_error;
use super::outbox::{Ingested, OutboxStore, fill};
use super::unreadable::readable;

const LOAD: &str = "SELECT event_type, topic_key FROM channel ORDER BY created_at, topic_key";

const OWNERS: &str = "SELECT topic_key, event_type FROM channel WHERE topic_key IN (SELECT value FROM json_each(?))";

const COUNT: &str = "SELECT count(*) FROM channel";

const RECORD: &str = "INSERT INTO channel (topic_key, event_type) VALUES (?, ?)";

/// Every event type with unfinished rows, due or not. A loose index scan: one seek per type.
const UNFINISHED_TYPES: &str = "WITH RECURSIVE kind (event_type) AS (
         SELECT min(event_type) FROM {table} INDEXED BY {table}_pending_of_type WHERE status IN (0, 2)
         UNION ALL
         SELECT (SELECT min(event_type) FROM {table} INDEXED BY {table}_pending_of_type
                 WHERE status IN (0, 2) AND event_type > kind.event_type)
         FROM kind WHERE kind.event_type IS NOT NULL
     )
     SELECT event_type FROM kind WHERE typeof(event_type) = 'text'
       AND replace(event_type, '.', '_') IN (SELECT value FROM json_each(?))";

/// Which event type owns which topic, recorded together with the first outbox row of the type.
///
/// Two event types that differ only in `.` and `_` would share a topic. The first of them owns it, and this table says
/// which one that was, also after a restart.
#[derive(Clone)]
pub struct ChannelStore(Arc<Shared>);

struct Shared {
    database: Database,
    outbox: OutboxStore,
    limit: usize,
    /// Topic key → its owner. An owner never changes, so this cache cannot be stale.
    recorded: Mutex<HashMap<String, String>>,
}

/// Why an event type gets no channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Another event type owns the topic.
    Taken {
        /// That type.
        owner: String,
    },
    /// There are as many channels as there may be.
    Full {
        /// How many that is.
        limit: usize,
    },
}

/// The answer to one event of an ingest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Its type has a channel, and this is what the outbox did with the event.
    Ingested(Ingested),
    /// Its type gets no channel; nothing was stored.
    Refused(Refusal),
}

impl ChannelStore {
    /// The channels of this outbox, at most `limit` of them. The database's hub tables must be up to date.
    pub fn new(database: Database, outbox: OutboxStore, limit: usize) -> Self {
        Self(Arc::new(Shared { database, outbox, limit, recorded: Mutex::default() }))
    }

    /// The event types of all recorded channels, oldest first.
    pub async fn load(&self) -> Result<Vec<String>, StoreError> {
        let rows = sqlx::query(LOAD)
            .fetch_all(self.0.database.readers())
            .await
            .map_err(|error| store_error("read the channels", error))?;
        let types = readable("channel", &rows, 1, |row| row.try_get::<String, _>(0));
        self.lock().extend(types.iter().map(|event_type| (topic_key(event_type), event_type.clone())));
        Ok(types)
    }

    /// Records the channels of event types whose rows other programs inserted; answers in the same order.
    pub async fn record(&self, event_types: Vec<String>) -> Result<Vec<Result<(), Refusal>>, StoreError> {
        let owners = self.owners(event_types.iter().map(String::as_str));
        let (channels, event_types) = (self.clone(), Arc::new(event_types));
        let write = self.0.database.write("record channels", move |connection| {
            let (channels, mut owners, event_types) = (channels.clone(), owners.clone(), event_types.clone());
            Box::pin(async move {
                channels.read_owners(connection, &mut owners).await?;
                let mut answers = Vec::with_capacity(event_types.len());
                for event_type in event_types.iter() {
                    let answer = owners.judge(event_type, &HashMap::new());
                    if answer.is_ok() {
                        owners.record(connection, event_type).await?;
                    }
                    answers.push(answer);
                }
                Ok((answers, owners))
            })
        });
        let (answers, owners) = write.await?;
        self.lock().extend(owners.by_key);
        Ok(answers)
    }

    /// Stores new events and records the channels of their types in one transaction; answers in the same order. An
    /// `atomic` batch is stored whole or not at all. A type of which nothing is stored gets no channel.
    pub async fn ingest(&self, events: Vec<Arc<Event>>, atomic: bool) -> Result<Vec<Admission>, StoreError> {
        let owners = self.owners(events.iter().map(|event| event.event_type()));
        let (channels, events) = (self.clone(), Arc::new(events));
        let write = self.0.database.write("store events in the outbox", move |connection| {
            let (channels, mut owners, events) = (channels.clone(), owners.clone(), events.clone());
            Box::pin(async move {
                channels.read_owners(connection, &mut owners).await?;
                let answers = match atomic {
                    true => channels.store_atomic(connection, &mut owners, &events).await?,
                    false => channels.store_each(connection, &mut owners, &events).await?,
                };
                Ok((answers, owners))
            })
        });
        let (answers, owners) = write.await?;
        self.lock().extend(owners.by_key);
        Ok(answers)
    }

    /// Two new types of one batch may want the same topic. The batch is cut before the second: whether the first owns the
    /// topic is known only when an event of it is stored.
    async fn store_each(
        &self,
        connection: &mut SqliteConnection,
        owners: &mut Owners,
        events: &[Arc<Event>],
    ) -> Result<Vec<Admission>, sqlx::Error> {
        let mut answers = Vec::with_capacity(events.len());
        let mut rest = events;
        while !rest.is_empty() {
            let (part, later) = rest.split_at(owners.independent(rest));
            let refusals = part.iter().map(|event| owners.judge(event.event_type(), &HashMap::new()).err()).collect();
            answers.extend(self.store_part(connection, owners, part, refusals, false).await?);
            rest = later;
        }
        Ok(answers)
    }

    async fn store_atomic(
        &self,
        connection: &mut SqliteConnection,
        owners: &mut Owners,
        events: &[Arc<Event>],
    ) -> Result<Vec<Admission>, sqlx::Error> {
        let mut wanted = HashMap::new();
        let mut refusals = Vec::with_capacity(events.len());
        for event in events {
            let judged = owners.judge(event.event_type(), &wanted);
            let key = topic_key(event.event_type());
            if judged.is_ok() && !owners.by_key.contains_key(&key) {
                wanted.entry(key).or_insert_with(|| event.event_type().to_owned());
            }
            refusals.push(judged.err());
        }
        if refusals.iter().any(Option::is_some) {
            let withheld = || Admission::Ingested(Ingested::Withheld);
            return Ok(refusals.into_iter().map(|refusal| refusal.map_or_else(withheld, Admission::Refused)).collect());
        }
        self.store_part(connection, owners, events, refusals, true).await
    }

    async fn store_part(
        &self,
        connection: &mut SqliteConnection,
        owners: &mut Owners,
        events: &[Arc<Event>],
        refusals: Vec<Option<Refusal>>,
        atomic: bool,
    ) -> Result<Vec<Admission>, sqlx::Error> {
        let admitted = events.iter().zip(&refusals).filter(|(_, refusal)| refusal.is_none());
        let admitted: Vec<Arc<Event>> = admitted.map(|(event, _)| event.clone()).collect();
        let ingested = self.0.outbox.store_batch(connection, &admitted, atomic).await?;
        for (event, ingested) in admitted.iter().zip(&ingested) {
            if *ingested == Ingested::Stored {
                owners.record(connection, event.event_type()).await?;
            }
        }
        let mut ingested = ingested.into_iter();
        let answer = |refusal| match refusal {
            Some(refusal) => Admission::Refused(refusal),
            None => Admission::Ingested(ingested.next().unwrap_or(Ingested::Withheld)),
        };
        Ok(refusals.into_iter().map(answer).collect())
    }

    /// What is known without the database of the owners of these types' topics.
    fn owners<'a>(&self, event_types: impl Iterator<Item = &'a str>) -> Owners {
        let recorded = self.lock();
        let mut owners = Owners { limit: self.0.limit, ..Owners::default() };
        for key in event_types.map(topic_key).collect::<HashSet<_>>() {
            match recorded.get(&key) {
                Some(owner) => _ = owners.by_key.insert(key, owner.clone()),
                None => owners.unknown.push(key),
            }
        }
        owners
    }

    /// Completes what is known of the owners. Rows of other programs own the topic of their type from the moment at which
    /// they are first seen, which is here or in [`record`](Self::record).
    async fn read_owners(&self, connection: &mut SqliteConnection, owners: &mut Owners) -> Result<(), sqlx::Error> {
        if owners.unknown.is_empty() {
            return Ok(());
        }
        let unknown = serde_json::to_string(&owners.unknown).map_err(|error| sqlx::Error::Encode(error.into()))?;
        let recorded: Vec<(String, String)> =
            sqlx::query_as(OWNERS).bind(unknown.as_str()).fetch_all(&mut *connection).await?;
        owners.by_key.extend(recorded);
        let count: i64 = sqlx::query_scalar(COUNT).fetch_one(&mut *connection).await?;
        owners.count = usize::try_from(count).unwrap_or_default();
        if owners.unknown.iter().all(|key| owners.by_key.contains_key(key)) {
            return Ok(());
        }
        let unfinished = fill(UNFINISHED_TYPES, self.0.outbox.table(), self.0.outbox.mode());
        let seen: Vec<String> =
            sqlx::query_scalar(AssertSqlSafe(unfinished)).bind(unknown).fetch_all(&mut *connection).await?;
        for event_type in seen {
            if owners.judge(&event_type, &HashMap::new()).is_ok() {
                owners.record(connection, &event_type).await?;
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, String>> {
        self.0.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What event types that differ only in `.` and `_` have in common.
fn topic_key(event_type: &str) -> String {
    event_type.replace('.', "_")
}

/// The owners of the topics that one write is about.
#[derive(Clone, Default)]
struct Owners {
    /// Topic key → its recorded owner.
    by_key: HashMap<String, String>,
    /// Topic keys that the cache does not know.
    unknown: Vec<String>,
    /// How many channels are recorded in all. Read only where something is unknown.
    count: usize,
    limit: usize,
}

impl Owners {
    /// Whether the type has a channel or may get one. `wanted` are the topics that other types of the batch would get.
    fn judge(&self, event_type: &str, wanted: &HashMap<String, String>) -> Result<(), Refusal> {
        let key = topic_key(event_type);
        match self.by_key.get(&key).or_else(|| wanted.get(&key)) {
            Some(owner) if owner == event_type => Ok(()),
            Some(owner) => Err(Refusal::Taken { owner: owner.clone() }),
            None if self.count + wanted.len() >= self.limit => Err(Refusal::Full { limit: self.limit }),
            None => Ok(()),
        }
    }

    /// How many of the first events are judged alike whether or not those before them are stored. At least one.
    fn independent(&self, events: &[Arc<Event>]) -> usize {
        if self.unknown.is_empty() {
            return events.len();
        }
        let mut wanted = HashMap::new();
        let nothing = HashMap::new();
        for (index, event) in events.iter().enumerate() {
            let event_type = event.event_type();
            if self.judge(event_type, &wanted) != self.judge(event_type, &nothing) {
                return index;
            }
            let key = topic_key(event_type);
            if !self.by_key.contains_key(&key) && self.judge(event_type, &nothing).is_ok() {
                wanted.entry(key).or_insert_with(|| event_type.to_owned());
            }
        }
        events.len()
    }

    /// Records that the type owns its topic, unless that is recorded already.
    async fn record(&mut self, connection: &mut SqliteConnection, event_type: &str) -> Result<(), sqlx::Error> {
        let key = topic_key(event_type);
        if self.by_key.contains_key(&key) {
            return Ok(());
        }
        sqlx::query(RECORD).bind(key.as_str()).bind(event_type).execute(connection).await?;
        self.by_key.insert(key, event_type.to_owned());
        self.count += 1;
        Ok(())
    }
}
