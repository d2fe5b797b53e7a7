//! Every line of SQL of Posthaste, so that a database expert has one place to read.
//!
//! One module per database, each behind a Cargo feature and each with the same table of contents: the outbox table as a
//! [`Store`](posthaste_core::outbox::Store), its migrations, the inbox. PostgreSQL and SQLite also have a
//! [`HubDatabase`](posthaste_core::hub_store::HubDatabase): the built-in log, the dead letters, the registry and the
//! channels. The modules beside them hold the code that all databases share. They contain no SQL.

#![warn(missing_docs)]

#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod audit;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod begin;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod channels;
mod database_kind;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
mod inbox;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod list;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod log;
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
#[cfg(all(feature = "postgres", feature = "mysql", feature = "sqlite"))]
pub mod sources;
#[cfg(feature = "sqlite")]
pub mod sqlite;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod subscription_filter;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
mod table_sql;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod unreadable;

pub use database_kind::{DatabaseKind, UnknownDatabase};
pub use migrations::MigrationText;
pub use posthaste_core::outbox::{BadTableName, TableName};
