use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use posthaste_core::StoreError;
use sqlx::migrate::MigrateError;
use sqlx::{AssertSqlSafe, PgPool, Postgres, Transaction};
use tokio::sync::Semaphore;

use self::lane::Lane;
use self::ownership::Ownership;
use super::clock::NOW;
use super::faults::store_error;
use super::migrations;
use crate::TableName;
use crate::migrations::newest;
use crate::outbox::{Mode, OutboxRow, Reader};

mod doors;
mod lane;
mod ownership;
#[cfg(test)]
mod plans;
mod rows;
mod settling;
mod source;

pub use source::OutboxSource;

/// One outbox table and this process's part in it: the door through which events come in, and the sources through
/// which they go out.
///
/// The table lies in the service's own database and is reached through the service's own pool, so that an event is
/// written in the same transaction as what it tells of.
#[derive(Clone)]
pub struct Outbox(Arc<Shared>);

struct Shared {
    pool: PgPool,
    table: TableName,
    reader: Reader,
    mode: Mode,
    lease: Duration,
    /// In single-node mode.
    ownership: Ownership,
    /// In multi-node mode: one row whose lease was lost before may be in flight, because it may be what kills processes.
    suspects: Arc<Semaphore>,
    /// By event type; the dispatcher's one lane has the empty name, which no event type can have.
    lanes: Mutex<HashMap<String, Arc<Lane>>>,
    open_sources: AtomicUsize,
}

/// Why an outbox cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutboxError {
    /// The database could not keep every text.
    #[error("database has the encoding {encoding}: create it with ENCODING 'UTF8'")]
    OtherEncoding {
        /// As `SHOW server_encoding` names it.
        encoding: String,
    },
    /// A newer program made its table.
    #[error(
        "outbox table {table} has schema {found}, newer than this program, which knows {known}: use a newer posthaste"
    )]
    NewerSchema {
        /// The table in question.
        table: TableName,
        /// The newest migration that was made.
        found: i64,
        /// The newest migration that this program knows.
        known: i64,
    },
    /// Its table cannot be brought up to date.
    #[error("outbox table {table} cannot be brought up to date")]
    Migration {
        /// The table in question.
        table: TableName,
        /// What went wrong.
        source: MigrateError,
    },
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
    /// Its table is read in the other mode; the two know nothing of each other's claims.
    #[error(
        "outbox table {table} is read in mode {recorded}: use that mode, or stop all that read it and then change \
         \"mode\" in table {table}_owner"
    )]
    OtherMode {
        /// The table in question.
        table: TableName,
        /// The mode in which it was opened first.
        recorded: String,
    },
    /// The database did not do what it was asked.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Outbox {
    /// Brings the table up to date and records its kind of reader and its mode, or finds them to be the same as before.
    ///
    /// All processes that read a table give the same `lease`: in multi-node mode who claims decides by its own whether
    /// another's has ended.
    pub async fn open(
        pool: PgPool,
        table: TableName,
        reader: Reader,
        mode: Mode,
        lease: Duration,
    ) -> Result<Self, OutboxError> {
        let failed = |error| store_error("open the outbox", error);
        let encoding: String =
            sqlx::query_scalar("SELECT current_setting('server_encoding')").fetch_one(&pool).await.map_err(failed)?;
        if encoding != "UTF8" {
            return Err(OutboxError::OtherEncoding { encoding });
        }
        migrate(&pool, &table).await?;
        let insert = "INSERT INTO {table}_owner (reader, mode) VALUES ($1, $2) ON CONFLICT DO NOTHING";
        let insert = sqlx::query(AssertSqlSafe(fill(insert, &table))).bind(reader.word()).bind(mode.word());
        insert.execute(&pool).await.map_err(failed)?;
        let select = AssertSqlSafe(fill("SELECT reader, mode FROM {table}_owner", &table));
        let recorded: (String, String) = sqlx::query_as(select).fetch_one(&pool).await.map_err(failed)?;
        if recorded.0 != reader.word() {
            return Err(OutboxError::OtherReader { table, recorded: recorded.0, asked: reader });
        }
        if recorded.1 != mode.word() {
            return Err(OutboxError::OtherMode { table, recorded: recorded.1 });
        }
        Ok(Self(Arc::new(Shared {
            ownership: Ownership::new(&table, lease),
            pool,
            table,
            reader,
            mode,
            lease,
            suspects: Arc::new(Semaphore::new(1)),
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
        let lane =
            lanes.entry(name.to_owned()).or_insert_with(|| Arc::new(Lane::new(&self.0.table, self.0.mode, name)));
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
    pub async fn pending_types(&self) -> Result<Vec<String>, StoreError> {
        let failed = |error| store_error("list the pending event types of the outbox", error);
        let mut scan = self.scan().await.map_err(failed)?;
        let types = sqlx::query_scalar(self.sql(rows::PENDING_TYPES)).fetch_all(&mut *scan).await.map_err(failed)?;
        scan.commit().await.map_err(failed)?;
        Ok(types)
    }

    /// The row of one event, wherever it stands.
    pub async fn find(&self, event_id: &str) -> Result<Option<OutboxRow>, StoreError> {
        let failed = |error| store_error("find an event in the outbox", error);
        let sql = AssertSqlSafe(rows::find(&self.0.table));
        let row = sqlx::query(sql).bind(event_id).fetch_optional(&self.0.pool).await.map_err(failed)?;
        row.map(|row| rows::read(&row).map_err(failed)).transpose()
    }

    /// A transaction to read or claim pending rows in.
    async fn scan(&self) -> Result<Transaction<'static, Postgres>, sqlx::Error> {
        self.0.pool.begin_with(rows::SCAN).await
    }

    /// A suspect is no longer in flight: the next one may be, of whatever type it is.
    fn suspect_is_gone(&self) {
        for lane in self.lanes().values() {
            lane.look_from_the_beginning();
            lane.wakeup.wake();
        }
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

async fn migrate(pool: &PgPool, table: &TableName) -> Result<(), OutboxError> {
    let migrator = migrations::outbox(table);
    migrator.run(pool).await.map_err(|error| match error {
        MigrateError::VersionMissing(found) => {
            OutboxError::NewerSchema { table: table.clone(), found, known: newest(&migrator) }
        }
        source => OutboxError::Migration { table: table.clone(), source },
    })
}

/// Fills in the table's name, as the migrations do, and the database's clock.
fn fill(template: &str, table: &TableName) -> String {
    template.replace("{table}", table.as_str()).replace("{now}", NOW)
}
