//! Posthaste on PostgreSQL: the outbox and the inbox, on the pool that the service already has, and the database of a hub
//! with any number of processes.

mod audit;
mod channels;
mod clock;
mod database;
mod dead_letters;
mod errors;
mod hub_database;
mod hub_migrations;
mod inbox;
mod log;
mod migrations;
mod notify;
mod outbox;
#[cfg(test)]
mod plans;
mod registry;
mod schemas;
mod texts;

pub use audit::AuditTable;
pub use channels::ChannelTable;
pub use database::{Database, MIN_CONNECTIONS};
pub use dead_letters::DeadLetterTable;
pub use hub_database::HubDatabase;
#[cfg(all(feature = "mysql", feature = "sqlite"))]
pub(crate) use hub_database::name_of;
pub use hub_migrations::migrate_hub;
pub use inbox::Inbox;
pub use log::{Log, LogTables};
pub use migrations::{hub_migrations, migrations};
pub use outbox::OutboxStore;
pub use registry::RegistryTables;
pub use schemas::SchemaTables;
