use crate::migrations::{Dialect, MigrationText, migration};
use crate::table_sql::fill_table;
use posthaste_core::outbox::{Mode, TableName};

pub(super) const DIALECT: Dialect = Dialect {
    outbox: &[migration!("postgres", "outbox", "0001_outbox")],
    ordered: &[migration!("postgres", "ordered", "0001_ordered")],
    inbox: &[migration!("postgres", "inbox", "0001_inbox")],
    fill,
    time: "TIMESTAMPTZ NOT NULL DEFAULT now()",
    bytes: "BYTEA",
    hex: ("'\\x", "'"),
};

/// The migrations of an outbox table of this name for this mode, to be read, or to be run by a user who may create tables.
/// After that, a process needs no other rights than to read and write the tables.
pub fn migrations(table: &TableName, mode: Mode) -> Vec<MigrationText> {
    DIALECT.texts(table, mode)
}

/// Fills in the name of a table, in lower case, as PostgreSQL reads a name without quotes: a service and what other programs
/// write about the table mean the same one, however they spell it.
pub(super) fn fill(sql: &str, table: &TableName) -> String {
    fill_table(sql, &table.to_lowercase(), '"')
}
