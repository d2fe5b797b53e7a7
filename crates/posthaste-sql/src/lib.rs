//! Every line of SQL of Posthaste, so that a database expert has one place to read.
//!
//! One module per database, each with the same table of contents: the database itself (connections, one grouping
//! writer, migrations), the outbox table, the built-in log, the dead letters and the registry. SQLite is the first.

pub mod letters;
pub mod registry;
pub mod sqlite;
mod table_name;

pub use table_name::{BadTableName, TableName};
