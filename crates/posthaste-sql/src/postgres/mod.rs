//! Posthaste on PostgreSQL: the outbox and the inbox, on the pool that the service already has, and the built-in bus.

mod clock;
mod errors;
mod inbox;
mod log;
mod migrations;
mod notify;
mod outbox;

pub use inbox::Inbox;
pub use log::{Log, LogTables};
pub use migrations::{migrate_hub, migrations};
pub use outbox::OutboxStore;
