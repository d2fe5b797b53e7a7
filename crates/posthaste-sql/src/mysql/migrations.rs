use posthaste_core::outbox::{Mode, TableName};
use sqlx::migrate::Migrator;

use crate::migrations::{History, MigrationText, Numbered, migration, migrator, texts};
use crate::table_sql::fill_table;

/// In these, `{table}` stands for the name of the outbox table.
const OUTBOX: &[Numbered] = &[migration!("mysql", "outbox", "0001_outbox")];
const ORDERED: &[Numbered] = &[migration!("mysql", "ordered", "0001_ordered")];

const INBOX: &[Numbered] = &[migration!("mysql", "inbox", "0001_inbox")];

/// What makes an outbox table of this name for this mode, to be read or to be run by a user who may create tables. Where it was
/// run, a process starts with rights to read and write the tables and no others.
pub fn migrations(table: &TableName, mode: Mode) -> Vec<MigrationText> {
    let mut all = texts(OUTBOX, &history(outbox_history(table)), |sql| fill(sql, table));
    if matches!(mode, Mode::Ordered(_)) {
        all.extend(texts(ORDERED, &history(ordered_history(table)), |sql| fill(sql, table)));
    }
    all
}

/// As sqlx makes it.
fn history(table: String) -> History {
    History { table, time: "TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP", bytes: "BLOB", hex: ("x'", "'") }
}

fn outbox_history(table: &TableName) -> String {
    format!("{table}_migration")
}

fn ordered_history(table: &TableName) -> String {
    format!("{table}_ordered")
}

/// Each outbox table has its own history, because a database may hold several.
pub(super) fn outbox(table: &TableName) -> Migrator {
    migrator(OUTBOX, outbox_history(table), |sql| fill(sql, table))
}

/// What ordered mode needs besides.
pub(super) fn ordered(table: &TableName) -> Migrator {
    migrator(ORDERED, ordered_history(table), |sql| fill(sql, table))
}

/// A receiver's inbox.
pub(super) fn inbox(table: &TableName) -> Migrator {
    migrator(INBOX, format!("{table}_migration"), |sql| fill(sql, table))
}

/// Fills in the name of a table.
pub(super) fn fill(sql: &str, table: &TableName) -> String {
    fill_table(sql, table, '`')
}
