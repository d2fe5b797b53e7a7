//! The outbox and the inbox on MySQL and MariaDB, on the pool that the service already has.
//!
//! It needs MySQL 8.0.16 or MariaDB 10.6, or later. These databases cannot notify other processes of a commit: other
//! processes find new events by polling.

mod clock;
mod errors;
mod inbox;
mod migrations;
mod outbox;
mod pooled;

pub use errors::TooLong;
pub use inbox::Inbox;
pub use migrations::migrations;
pub use outbox::OutboxStore;
