use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use posthaste_core::StoreError;
use sqlx::{AssertSqlSafe, Row};

use self::lane::Lane;
use self::nameless::Nameless;
use self::ownership::Ownership;
use super::clock::{NOW_MS, NOW_TEXT};
use super::database::{Database, OpenError, store_error};
use crate::TableName;
use crate::outbox::{OutboxRow, Reader};

mod doors;
mod lane;
mod nameless;
mod ownership;
#[cfg(test)]
mod plans;
mod rows;
mod settling;
mod source;

pub use doors::Ingested;
pub use source::OutboxSource;

/// One outbox table and this process's part in it: the doors through which events come in, and the sources through
/// which they go out.
///
/// Claims are made in memory, under one leased and fenced owner row per table: delivering an event costs one write.
/// A second process that opens the table may write to it at once, and claims nothing until the first gave it up.
#[derive(Clone)]
pub struct Outbox(Arc<Shared>);

struct Shared {
    database: Database,
    table: TableName,
    reader: Reader,
    ownership: Ownership,
    /// By event type; the dispatcher's one lane has the empty name, which no event type can have.
    lanes: Mutex<HashMap<String, Arc<Lane>>>,
    open_sources: AtomicUsize,
}

/// Why an outbox cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutboxError {
    /// Its table cannot be brought up to date.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its table belongs to the other kind of reader.
    #[error(
        "outbox table {table} is read by {recorded} and cannot be read by {asked}: give this one another table name"
    )]
    OtherReader {
        /// The table in question.
        table: TableName,
        /// The kind that opened it first.
        recorded: String,
        /// The kind that was asked for now.
        asked: Reader,
    },
    /// The database did not do what it was asked.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Outbox {
    /// Brings the table up to date and records its kind of reader, or finds it to be the same as before.
    pub async fn open(
        database: Database,
        table: TableName,
        reader: Reader,
        lease: Duration,
    ) -> Result<Self, OutboxError> {
        database.migrate_outbox(&table).await?;
        let insert = fill("INSERT INTO {table}_owner (only, reader) VALUES (1, ?) ON CONFLICT DO NOTHING", &table);
        let select = fill("SELECT reader FROM {table}_owner", &table);
        let recorded: String = database
            .write("record the reader of the outbox", move |connection| {
                let (insert, select) = (insert.clone(), select.clone());
                Box::pin(async move {
                    sqlx::query(AssertSqlSafe(insert)).bind(reader.word()).execute(&mut *connection).await?;
                    sqlx::query_scalar(AssertSqlSafe(select)).fetch_one(connection).await
                })
            })
            .await?;
        if recorded != reader.word() {
            return Err(OutboxError::OtherReader { table, recorded, asked: reader });
        }
        Ok(Self(Arc::new(Shared {
            ownership: Ownership::new(&table, lease),
            database,
            table,
            reader,
            lanes: Mutex::default(),
            open_sources: AtomicUsize::new(0),
        })))
    }

    /// The source of every event of the table.
    ///
    /// # Panics
    /// When the table was opened for channels.
    pub fn dispatcher_source(&self) -> OutboxSource {
        assert_eq!(self.0.reader, Reader::Dispatcher, "outbox {} was opened for channels", self.0.table);
        self.source("")
    }

    /// The source of the events of one type.
    ///
    /// # Panics
    /// When the table was opened for the dispatcher.
    pub fn channel_source(&self, event_type: &str) -> OutboxSource {
        assert_eq!(self.0.reader, Reader::Channels, "outbox {} was opened for the dispatcher", self.0.table);
        self.source(event_type)
    }

    fn source(&self, name: &str) -> OutboxSource {
        self.0.open_sources.fetch_add(1, Ordering::AcqRel);
        let mut lanes = self.lanes();
        let lane = lanes.entry(name.to_owned()).or_insert_with(|| Arc::new(Lane::new(&self.0.table, name)));
        OutboxSource::new(self.clone(), lane.clone())
    }

    /// Makes the source that reads events of this type look now.
    pub fn wake(&self, event_type: &str) {
        if let Some(lane) = self.lane_of(event_type) {
            lane.wakeup.wake();
        }
    }

    /// For who has just committed a transaction with events in it: makes every source look now.
    pub fn committed(&self) {
        self.lanes().values().for_each(|lane| lane.wakeup.wake());
    }

    /// Event types with something due, to find channels that nobody opened yet and rows that others inserted.
    ///
    /// Rows whose type is no text in UTF-8 go dead on the way: no channel could ever claim them.
    pub async fn pending_types(&self) -> Result<Vec<String>, StoreError> {
        // A loose index scan: one seek per type, however many rows each has.
        let sql = self.sql(
            "WITH RECURSIVE kind (event_type) AS (
                 SELECT min(event_type) FROM {table} INDEXED BY {table}_pending_of_type WHERE status IN (0, 2)
                 UNION ALL
                 SELECT (SELECT min(event_type) FROM {table} INDEXED BY {table}_pending_of_type
                         WHERE status IN (0, 2) AND event_type > kind.event_type)
                 FROM kind WHERE kind.event_type IS NOT NULL
             )
             SELECT typeof(event_type) = 'text', CAST(event_type AS BLOB) FROM kind WHERE event_type IS NOT NULL AND EXISTS (
                 SELECT 1 FROM {table} INDEXED BY {table}_pending_of_type
                 WHERE status IN (0, 2) AND event_type = kind.event_type AND due <= {now_ms})",
        );
        let failed = |error| store_error("list the pending event types of the outbox", error);
        let rows = sqlx::query(sql).fetch_all(self.0.database.readers()).await.map_err(failed)?;
        let (mut types, mut nameless) = (Vec::with_capacity(rows.len()), Vec::new());
        for row in &rows {
            let (is_text, bytes) = (row.try_get(0).map_err(failed)?, row.try_get(1).map_err(failed)?);
            match std::str::from_utf8(bytes) {
                Ok(event_type) if is_text => types.push(event_type.to_owned()),
                _ => nameless.push(Nameless { is_text, bytes: bytes.to_vec() }),
            }
        }
        if !nameless.is_empty() {
            self.bury_nameless(nameless).await;
        }
        Ok(types)
    }

    /// The row of one event, wherever it stands.
    pub async fn find(&self, event_id: &str) -> Result<Option<OutboxRow>, StoreError> {
        let failed = |error| store_error("find an event in the outbox", error);
        let sql = AssertSqlSafe(rows::find(&self.0.table));
        let row = sqlx::query(sql).bind(event_id).fetch_optional(self.0.database.operators()).await.map_err(failed)?;
        row.map(|row| rows::read(&row).map_err(failed)).transpose()
    }

    /// Ends whatever lease an earlier process left behind. Only for a process that knows itself alone, for example
    /// because it holds a lock beside the database file.
    pub async fn void_lease(&self) -> Result<(), StoreError> {
        self.0.ownership.void(&self.0.database).await
    }

    fn lanes(&self) -> MutexGuard<'_, HashMap<String, Arc<Lane>>> {
        self.0.lanes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn lane_of(&self, event_type: &str) -> Option<Arc<Lane>> {
        let name = match self.0.reader {
            Reader::Dispatcher => "",
            Reader::Channels => event_type,
        };
        self.lanes().get(name).cloned()
    }

    /// A statement on this table; see [`fill`] for what its text may leave open.
    fn sql(&self, template: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(fill(template, &self.0.table))
    }
}

/// Fills in the table's name, as the migrations do, and the database's clock.
pub(super) fn fill(template: &str, table: &TableName) -> String {
    template.replace("{table}", table.as_str()).replace("{now_ms}", NOW_MS).replace("{now}", NOW_TEXT)
}
