//! The outbox and the inbox on PostgreSQL, on the pool that the service already has.

mod clock;
mod errors;
mod inbox;
mod migrations;
mod outbox;

pub use inbox::Inbox;
pub use migrations::migrations;
pub use outbox::OutboxStore;
