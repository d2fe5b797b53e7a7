//! The tables of the built-in bus: topics, partitions, offsets and group leases.

mod append;
mod inspect;
mod leases;
mod quarantine;
mod read;
mod retention;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::bus::{Advance, PublishError, Record};
use posthaste_core::log::{AppendNotifier, Leases, LogStore, Look, Member, NewRecord, Newest, StoredRecord};

use super::Database;
use crate::log::MAX_READ_BYTES;

/// The bus on SQLite.
pub type Log = posthaste_core::log::Log<LogTables>;

/// The tables of the built-in bus on SQLite.
#[derive(Clone)]
pub struct LogTables {
    database: Database,
    /// The progress rows that were already reported as unreadable. Leases are renewed every few seconds, but each row is
    /// logged only once.
    reported: Arc<Mutex<HashSet<String>>>,
}

impl LogTables {
    /// The tables of a database whose hub tables are up to date, see [`Database::migrate_hub`].
    pub fn new(database: Database) -> Self {
        Self { database, reported: Arc::default() }
    }

    /// Ends all memberships and leases of all groups. Only for a process that knows that no other process uses the file:
    /// the consumers of a process that was killed would otherwise keep theirs until they expire.
    pub async fn void_leases(&self) -> Result<(), StoreError> {
        leases::void(&self.database).await
    }
}

#[async_trait]
impl LogStore for LogTables {
    fn check(&self, _: &Record) -> Result<(), PublishError> {
        Ok(())
    }

    /// Only one process uses a file.
    fn notifier(&self) -> Option<&dyn AppendNotifier> {
        None
    }

    async fn create_topics(&self, names: Vec<String>, partitions: u32) -> Result<Vec<(String, Vec<i64>)>, StoreError> {
        append::create_topics(&self.database, names, partitions).await
    }

    async fn append(&self, records: Vec<NewRecord>) -> Result<(), StoreError> {
        append::append(&self.database, records).await
    }

    async fn newest(&self) -> Result<Newest, StoreError> {
        read::newest(&self.database).await
    }

    async fn read(&self, places: &[(i64, i64)], limit: usize) -> Result<(Vec<StoredRecord>, bool), StoreError> {
        read::read(self.database.readers(), places, limit, MAX_READ_BYTES).await
    }

    async fn look(&self, member: &Member, lease: Duration) -> Result<Look, StoreError> {
        leases::look(&self.database, member, lease).await
    }

    async fn lease(&self, member: &Member, lease: Duration) -> Result<Leases, StoreError> {
        leases::lease(self, member, lease).await
    }

    async fn record(&self, member: &Member, advances: &[Advance]) -> Result<Vec<i64>, StoreError> {
        leases::record(&self.database, member, advances).await
    }

    async fn release(&self, member: &Member, partitions: &[i64]) -> Result<(), StoreError> {
        leases::release(&self.database, member, partitions).await
    }

    async fn leave(&self, member: &Member) -> Result<(), StoreError> {
        leases::leave(&self.database, member).await
    }
}
