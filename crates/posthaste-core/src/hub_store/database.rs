use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{
    AuditStore, BusInspector, ChannelStore, DeadLetterStore, HubOutbox, Migrations, QuarantineStore, Registry,
    SchemaStore,
};
use crate::bus::Bus;
use crate::{BoxError, StoreError, outbox};

/// A database that holds all tables of a hub.
///
/// How many processes may share it is a property of the database, and so is the mode of its outbox. A database for one
/// process at a time is exclusive: it refuses a second process when it is opened, and [`open`](Self::open) ends the
/// leases of an earlier process.
#[async_trait]
pub trait HubDatabase: Send + Sync + 'static {
    /// The migrations, for operators.
    fn migrations(&self) -> &dyn Migrations;

    /// Brings the schema up to date. A schema that is up to date, or newer and compatible, is left as it is, which needs no
    /// right to create tables.
    async fn migrate(&self) -> Result<(), OpenError>;

    /// Opens the stores of all roles. The schema must be up to date.
    async fn open(&self, options: HubOptions) -> Result<HubStores, OpenError>;

    /// Opens only the registry, for a process that starts no hub. The schema must be up to date.
    fn registry(&self) -> Arc<dyn Registry>;

    /// Writes this many bytes, commits them and deletes them: fails if the disk is full or the database is read-only.
    /// The schema must be up to date.
    async fn check_write(&self, bytes: usize) -> Result<(), StoreError>;

    /// Waits for queued writes, then closes all connections. If the database is exclusive, another process may open it
    /// now.
    async fn close(&self);
}

/// The settings that the stores need.
#[derive(Clone, Debug)]
pub struct HubOptions {
    /// How long claims and partitions are leased.
    pub lease: Duration,
    /// How many channels may be recorded.
    pub max_channels: usize,
    /// How many partitions a new topic of the built-in bus has, if several processes may read it. A database for one
    /// process has one.
    pub partitions: u32,
    /// True to keep the order of the events of an aggregate, from the outbox to their topics.
    pub is_ordered: bool,
}

/// The stores of all roles, on one database.
#[derive(Clone)]
pub struct HubStores {
    /// The outbox table, opened for channels.
    pub outbox: Arc<dyn HubOutbox>,
    /// The owners of topics, and the ingest of events.
    pub channels: Arc<dyn ChannelStore>,
    /// The bus.
    pub bus: Arc<dyn Bus>,
    /// The records that cannot be read.
    pub quarantine: Arc<dyn QuarantineStore>,
    /// The operator queries on the bus.
    pub inspector: Arc<dyn BusInspector>,
    /// The dead letters.
    pub dead_letters: Arc<dyn DeadLetterStore>,
    /// The audit log.
    pub audit: Arc<dyn AuditStore>,
    /// Definitions and subscriptions.
    pub registry: Arc<dyn Registry>,
    /// The tables of the built-in Schema Registry.
    pub schemas: Arc<dyn SchemaStore>,
}

/// Why a database cannot be used for a hub.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The database cannot be reached with this configuration.
    #[error("{problem}")]
    Unreachable {
        /// The problem and its remedy.
        problem: String,
        /// The error of the database or of the operating system.
        #[source]
        source: BoxError,
    },
    /// The database is exclusive, and another server uses it.
    #[error("database {database} is in use by another posthaste server: stop that one, or set database.url")]
    InUse {
        /// The name of the database.
        database: String,
    },
    /// A newer program made the schema, and this program does not work with it.
    #[error(
        "database schema {found} is newer than this program, which knows {known} and does not work with it: use a newer \
         posthaste, or another database"
    )]
    NewerSchema {
        /// The newest migration that was applied.
        found: i64,
        /// The newest migration that this program knows.
        known: i64,
    },
    /// A migration failed.
    #[error(
        "database schema cannot be migrated: if this user may not create tables, let one who may run `posthaste migrate`"
    )]
    Migration(#[source] BoxError),
    /// The outbox table cannot be opened.
    #[error(transparent)]
    Outbox(#[from] outbox::OpenError),
    /// The database does not answer.
    #[error("the database does not answer")]
    Store(#[from] StoreError),
}
