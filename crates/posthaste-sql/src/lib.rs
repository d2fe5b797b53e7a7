//! Every line of SQL of Posthaste, so that a database expert has one place to read.
//!
//! One module per database and feature, each with the same table of contents: the database itself (connections, one
//! grouping writer, migrations), the outbox table, the built-in log, the dead letters and the registry. SQLite has all
//! of it, PostgreSQL the outbox. What they have in common, and no SQL, is in the modules beside them.

#[cfg(feature = "sqlite")]
pub mod letters;
mod migrations;
pub mod outbox;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod registry;
#[cfg(feature = "sqlite")]
pub mod sqlite;
mod table_name;

pub use table_name::{BadTableName, TableName};
