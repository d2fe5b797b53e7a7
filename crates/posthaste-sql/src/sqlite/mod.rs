//! Posthaste on SQLite: the outbox, on the file that the service already has, and the embedded default of the hub.

mod channels;
mod clock;
mod database;
mod errors;
mod inbox;
mod lag;
mod letters;
mod log;
mod migrations;
mod outbox;
mod registry;
mod unreadable;
mod writer;
mod writer_lock;

pub mod probe;

pub use channels::{Admission, ChannelStore, Refusal};
pub use database::{Database, OpenError, Schema, file_of};
pub use inbox::Inbox;
pub use letters::Letters;
pub use log::{Backlog, GroupProgress, Log, LogEntry, LogOptions, TopicState};
pub use migrations::migrations;
pub use outbox::{Ingested, OutboxStore, Transaction};
pub use registry::Registry;
