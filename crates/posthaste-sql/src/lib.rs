//! Every line of SQL of Posthaste, so that a database expert has one place to read.
//!
//! One module per database, each behind a Cargo feature and each with the same table of contents: the outbox table as a
//! [`Store`](posthaste_core::outbox::Store), its migrations, the inbox. SQLite also has a
//! [`HubDatabase`](posthaste_core::hub_store::HubDatabase): one writer that groups statements into commits, the built-in log,
//! the dead letters, the registry and the channels. The modules beside them hold the code that all databases share. They
//! contain no SQL.

#![warn(missing_docs)]

#[cfg(any(feature = "postgres", feature = "mysql"))]
mod begin;
mod database_kind;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
mod inbox;
mod migrations;
#[cfg(feature = "mysql")]
pub mod mysql;
mod outbox;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod server_errors;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod session;
#[cfg(feature = "sqlite")]
pub mod sqlite;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
mod table_sql;

pub use database_kind::{DatabaseKind, UnknownDatabase};
pub use migrations::MigrationText;
pub use posthaste_core::outbox::{BadTableName, TableName};
