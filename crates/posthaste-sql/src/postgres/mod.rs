//! Posthaste on PostgreSQL: the outbox and the inbox, on the pool that the service already has, the built-in bus
//! and the tables of the built-in Schema Registry.

mod clock;
mod errors;
mod inbox;
mod log;
mod migrations;
mod notify;
mod outbox;
mod schemas;

pub use inbox::Inbox;
pub use log::{Log, LogTables};
pub use migrations::{migrate_hub, migrations};
pub use outbox::OutboxStore;
pub use schemas::SchemaTables;
