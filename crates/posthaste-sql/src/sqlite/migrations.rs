use posthaste_core::outbox::{Mode, TableName};
use sqlx::migrate::Migrator;

use crate::migrations::{Dialect, MigrationText, Numbered, migration, migrator};
use crate::table_sql::fill_table;

pub(super) const DIALECT: Dialect = Dialect {
    outbox: &[migration!("sqlite", "outbox", "0001_outbox")],
    ordered: &[migration!("sqlite", "ordered", "0001_ordered")],
    inbox: &[migration!("sqlite", "inbox", "0001_inbox")],
    fill,
    time: "TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP",
    bytes: "BLOB",
    hex: ("x'", "'"),
};

const HUB: &[Numbered] = &[
    migration!("sqlite", "hub", "0001_log"),
    migration!("sqlite", "hub", "0002_dead_letters"),
    migration!("sqlite", "hub", "0003_registry"),
    migration!("sqlite", "hub", "0004_schemas"),
];

/// The tables of the hub: log, dead letters, registry, schemas.
pub(super) fn hub() -> Migrator {
    migrator(HUB, "posthaste_migration".to_owned(), str::to_owned)
}

/// The migrations of an outbox table of this name for this mode, as text. A person can read them, and a user with the
/// right to create tables can run them. After that, the service needs only the rights to read and write the tables.
pub fn migrations(table: &TableName, mode: Mode) -> Vec<MigrationText> {
    DIALECT.texts(table, mode)
}

/// Fills in the name of a table.
pub(super) fn fill(sql: &str, table: &TableName) -> String {
    fill_table(sql, table, '"')
}
