use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use posthaste_core::hub_store::{self, HubOptions, HubStores, Migrations, OpenError, Registry};
use posthaste_core::log::LogOptions;
use posthaste_core::outbox::{Mode, Reader, Table, TableName};
use posthaste_core::{StoreError, lock};

use super::database::{self, Database, file_of};
use super::file_lock::FileLock;
use super::{AuditTable, ChannelTable, DeadLetterTable, Log, LogTables, RegistryTables, SchemaTables};

/// A SQLite file that holds all tables of a hub, for one process at a time.
///
/// A lock file beside it (`FILE.lock`) shows other processes that it is in use. The operating system unlocks it when
/// the process ends, even by a crash. So a process that has the lock knows that all leases in the file are void.
pub struct HubDatabase {
    database: Database,
    /// `None` if the file was opened without the lock, and after a close.
    lock: Mutex<Option<FileLock>>,
}

impl HubDatabase {
    /// Opens the file for this process alone. A new file can be read by its owner only.
    pub async fn open(url: &str) -> Result<Self, OpenError> {
        // If the URL names no file, `open_shared` returns the error.
        let Some(file) = file_of(url) else { return Self::open_shared(url).await };
        let lock = FileLock::acquire(&Self::lock_file(&file)).map_err(|error| match error {
            std::fs::TryLockError::WouldBlock => OpenError::InUse { database: file.display().to_string() },
            std::fs::TryLockError::Error(source) => Self::unwritable(&file, source),
        })?;
        super::file_lock::make_private(&file);
        Ok(Self { lock: Mutex::new(Some(lock)), ..Self::open_shared(url).await? })
    }

    /// Opens the file without the lock, to read it while a server may use it. Leases of other processes stay valid.
    pub async fn open_shared(url: &str) -> Result<Self, OpenError> {
        Ok(Self { database: Database::open(url).await?, lock: Mutex::default() })
    }

    /// The file and its connections.
    pub fn database(&self) -> &Database {
        &self.database
    }

    /// True if a process has this file open exclusively. The check creates no file.
    pub fn is_in_use(file: &Path) -> std::io::Result<bool> {
        FileLock::is_held(&Self::lock_file(file))
    }

    /// The file whose lock shows that a process uses the database.
    pub fn lock_file(file: &Path) -> PathBuf {
        beside(file, ".lock")
    }

    /// The key file that belongs to this database file.
    pub fn key_file(file: &Path) -> PathBuf {
        beside(file, ".key")
    }

    /// The error for a folder in which the database file cannot be created.
    pub fn unwritable(file: &Path, source: std::io::Error) -> OpenError {
        let file = file.display();
        let problem =
            format!("database {file} cannot be used: check that its folder exists and that this user may write there");
        OpenError::Unreachable { problem, source: source.into() }
    }
}

fn beside(file: &Path, ending: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

#[async_trait]
impl hub_store::HubDatabase for HubDatabase {
    fn migrations(&self) -> &dyn Migrations {
        self
    }

    async fn migrate(&self) -> Result<(), OpenError> {
        self.database.migrate_hub().await
    }

    /// Only one process uses the file, so its outbox is in single-node mode.
    async fn open(&self, options: HubOptions) -> Result<HubStores, OpenError> {
        let HubOptions { lease, max_channels, is_ordered, .. } = options;
        let database = &self.database;
        let mode = if is_ordered { Mode::ORDERED } else { Mode::SingleNode };
        let outbox = database.outbox(TableName::default(), mode).await?;
        let tables = LogTables::new(database.clone());
        let log = Log::new(tables.clone(), LogOptions { lease, ..LogOptions::default() });
        let dead_letters = DeadLetterTable::new(database.clone());
        if lock(&self.lock).is_some() {
            outbox.void_lease().await?;
            tables.void_leases().await?;
            dead_letters.void_leases().await?;
        }
        let channels = ChannelTable::new(database.clone(), outbox.clone(), max_channels);
        Ok(HubStores {
            outbox: Arc::new(Table::open(outbox, Reader::Channels, lease).await?),
            channels: Arc::new(channels),
            bus: Arc::new(log),
            quarantine: Arc::new(tables.clone()),
            inspector: Arc::new(tables),
            dead_letters: Arc::new(dead_letters),
            audit: Arc::new(AuditTable::new(database.clone())),
            registry: self.registry(),
            schemas: Arc::new(SchemaTables::new(database.clone())),
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
        drop(lock(&self.lock).take());
    }
}

impl From<database::OpenError> for OpenError {
    fn from(error: database::OpenError) -> Self {
        let problem = error.to_string();
        match error {
            database::OpenError::BadUrl { source, .. } | database::OpenError::Unreachable { source, .. } => {
                Self::Unreachable { problem, source: source.into() }
            }
        }
    }
}
