//! Posthaste on SQLite: the outbox, on the file that the service already has, and the embedded default of the hub.

mod audit;
mod channels;
mod clock;
mod database;
mod dead_letters;
mod errors;
mod file_lock;
mod hub_database;
mod hub_migrations;
mod inbox;
mod json;
mod log;
mod migrations;
mod outbox;
#[cfg(test)]
mod plans;
mod registry;
mod schemas;
mod wal;
mod writer;
mod writer_lock;

pub use audit::AuditTable;
pub use channels::ChannelTable;
pub use database::{Database, OpenError, file_of};
pub use dead_letters::DeadLetterTable;
pub use hub_database::HubDatabase;
pub use inbox::Inbox;
pub use log::{Log, LogTables};
pub use migrations::{hub_migrations, migrations};
pub use outbox::{OutboxStore, Transaction};
pub use registry::RegistryTables;
pub use schemas::SchemaTables;
pub use wal::WAL_LIMIT;
