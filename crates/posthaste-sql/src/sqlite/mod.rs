//! Posthaste on SQLite: the embedded default.

mod clock;
mod database;
mod letters;
mod log;
mod migrations;
mod outbox;
mod registry;
mod writer;

pub mod probe;

pub use database::{Database, OpenError, Schema, file_of};
pub use letters::Letters;
pub use log::{GroupProgress, Log, LogEntry, LogOptions, TopicState};
pub use outbox::{Ingested, Outbox, OutboxError, OutboxSource};
pub use registry::Registry;

pub use crate::outbox::{OutboxItem, OutboxRow, OutboxStatus, Reader};
