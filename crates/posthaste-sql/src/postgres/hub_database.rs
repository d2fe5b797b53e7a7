use std::str::FromStr;
use std::sync::Arc;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{self, HubOptions, HubStores, Migrations, OpenError, Registry};
use posthaste_core::log::LogOptions;
use posthaste_core::outbox::{Mode, Pool, Reader, Table, TableName};
use sqlx::postgres::PgConnectOptions;

use super::database::{Database, unreachable};
use super::hub_migrations::migrate_hub;
use super::{AuditTable, ChannelTable, DeadLetterTable, Log, LogTables, RegistryTables, SchemaTables};

/// A PostgreSQL database that holds all tables of a hub, for any number of processes.
///
/// No process knows which of the others run. Each has its own leases, and those of a process that crashed end by
/// themselves.
pub struct HubDatabase {
    database: Database,
}

impl HubDatabase {
    /// Connects to the database of this URL, and opens at most this many connections. The database must exist.
    pub async fn open(url: &str, max_connections: u32) -> Result<Self, OpenError> {
        let options = PgConnectOptions::from_str(url).map_err(|source| {
            let problem = "database.url is not the URL of a PostgreSQL database: write postgres://USER@HOST/DATABASE";
            OpenError::Unreachable { problem: problem.to_owned(), source: source.into() }
        })?;
        let name = name_of(&options);
        let connected = Database::connect(options, max_connections).await;
        Ok(Self { database: connected.map_err(|source| unreachable(&name, source))? })
    }

    /// The name of the database in messages, without user and password; `None` if the URL is wrong.
    pub fn name(url: &str) -> Option<String> {
        PgConnectOptions::from_str(url).ok().map(|options| name_of(&options))
    }

    /// The connections.
    pub fn database(&self) -> &Database {
        &self.database
    }
}

pub(crate) fn name_of(options: &PgConnectOptions) -> String {
    let (host, port) = (options.get_host(), options.get_port());
    // Without a name, PostgreSQL uses the database that has the name of the user.
    let database = options.get_database().unwrap_or(options.get_username());
    format!("postgres://{host}:{port}/{database}")
}

#[async_trait]
impl hub_store::HubDatabase for HubDatabase {
    fn migrations(&self) -> &dyn Migrations {
        self
    }

    async fn migrate(&self) -> Result<(), OpenError> {
        migrate_hub(self.database.pool()).await
    }

    /// Many processes use the database, so its outbox is in multi-node mode, or in ordered mode.
    async fn open(&self, options: HubOptions) -> Result<HubStores, OpenError> {
        let HubOptions { lease, max_channels, partitions, is_ordered } = options;
        let database = &self.database;
        let mode = if is_ordered { Mode::ORDERED } else { Mode::MultiNode };
        let outbox = Pool::open(database.pool(), TableName::default(), mode).await?;
        let tables = LogTables::with_connections(database.pool().clone(), database.log_connections());
        let log = Log::new(tables.clone(), LogOptions { lease, partitions, ..LogOptions::default() });
        let channels = ChannelTable::new(database.clone(), outbox.clone(), max_channels);
        Ok(HubStores {
            outbox: Arc::new(Table::open(outbox, Reader::Channels, lease).await?),
            channels: Arc::new(channels),
            bus: Arc::new(log),
            quarantine: Arc::new(tables.clone()),
            inspector: Arc::new(tables),
            dead_letters: Arc::new(DeadLetterTable::new(database.clone())),
            audit: Arc::new(AuditTable::new(database.clone())),
            registry: self.registry(),
            schemas: Arc::new(SchemaTables::new(database.pool())),
        })
    }

    fn registry(&self) -> Arc<dyn Registry> {
        Arc::new(RegistryTables::new(self.database.clone()))
    }

    async fn check_write(&self, bytes: usize) -> Result<(), StoreError> {
        self.database.check_write(bytes).await
    }

    async fn close(&self) {
        self.database.close().await;
    }
}
