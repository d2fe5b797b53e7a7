use posthaste_core::outbox::{Mode, TableName};

use crate::migrations::{Dialect, MigrationText, migration};
use crate::table_sql::fill_table;

pub(super) const DIALECT: Dialect = Dialect {
    outbox: &[migration!("sqlite", "outbox", "0001_outbox")],
    ordered: &[migration!("sqlite", "ordered", "0001_ordered")],
    inbox: &[migration!("sqlite", "inbox", "0001_inbox")],
    hub: &[
        migration!("sqlite", "hub", "0001_log"),
        migration!("sqlite", "hub", "0002_dead_letters"),
        migration!("sqlite", "hub", "0003_registry"),
        migration!("sqlite", "hub", "0004_schemas"),
        migration!("sqlite", "hub", "0005_outbox", compatible_with 4),
        migration!("sqlite", "hub", "0006_channel_pause", compatible_with 4),
        migration!("sqlite", "hub", "0007_subscription_filter", compatible_with 4),
        migration!("sqlite", "hub", "0008_audit", compatible_with 4),
    ],
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

/// The migrations of a hub, as text.
pub fn hub_migrations() -> Vec<MigrationText> {
    DIALECT.hub_texts()
}

/// Fills in the name of a table.
pub(super) fn fill(sql: &str, table: &TableName) -> String {
    fill_table(sql, table, '"')
}
