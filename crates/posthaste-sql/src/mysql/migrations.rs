use crate::migrations::{Dialect, MigrationText, migration};
use crate::table_sql::fill_table;
use posthaste_core::outbox::{Mode, TableName};

pub(super) const DIALECT: Dialect = Dialect {
    outbox: &[migration!("mysql", "outbox", "0001_outbox")],
    ordered: &[migration!("mysql", "ordered", "0001_ordered")],
    inbox: &[migration!("mysql", "inbox", "0001_inbox")],
    hub: &[],
    fill,
    time: "TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP",
    bytes: "BLOB",
    hex: ("x'", "'"),
};

/// The migrations of an outbox table of this name for this mode, as text. A person can read them, and a user with the
/// right to create tables can run them. After that, the service needs only the rights to read and write the tables.
pub fn migrations(table: &TableName, mode: Mode) -> Vec<MigrationText> {
    DIALECT.texts(table, mode)
}

/// Fills in the name of a table.
pub(super) fn fill(sql: &str, table: &TableName) -> String {
    fill_table(sql, table, '`')
}
