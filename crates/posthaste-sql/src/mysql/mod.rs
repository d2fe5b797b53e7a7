//! Posthaste on MySQL and MariaDB: the outbox, on the pool that the service already has.
//!
//! MySQL from 8.0.16 and MariaDB from 10.6. Nobody can be told across processes that something was committed: other
//! processes find it when they look.

mod clock;
mod errors;
mod inbox;
mod migrations;
mod outbox;

pub use errors::TooLong;
pub use inbox::Inbox;
pub use migrations::migrations;
pub use outbox::OutboxStore;
