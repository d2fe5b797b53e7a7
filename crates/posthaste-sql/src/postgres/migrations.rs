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

/// The migrations of an outbox table of this name for this mode, as text. A person can read them, and a user with the
/// right to create tables can run them. After that, the service needs only the rights to read and write the tables.
pub fn migrations(table: &TableName, mode: Mode) -> Vec<MigrationText> {
    DIALECT.texts(table, mode)
}

/// Fills in the name of a table in lower case, as PostgreSQL reads a name without quotes. So a service and other
/// programs mean the same table, however they spell its name.
pub(super) fn fill(sql: &str, table: &TableName) -> String {
    fill_table(sql, &table.to_lowercase(), '"')
}
