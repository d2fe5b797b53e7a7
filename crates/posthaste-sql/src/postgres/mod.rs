//! Posthaste on PostgreSQL: the outbox, on the pool that the service already has.

mod clock;
mod faults;
mod migrations;
mod outbox;

pub use outbox::{Outbox, OutboxError, OutboxSource};

pub use crate::outbox::{Mode, OutboxItem, OutboxRow, OutboxStatus, Reader};
