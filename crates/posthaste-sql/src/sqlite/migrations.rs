use sqlx::migrate::Migrator;

use crate::TableName;
use crate::migrations::{Numbered, migration, migrator};

/// In these, `{table}` stands for the name of the outbox table.
const OUTBOX: &[Numbered] = &[migration!("sqlite", "outbox", "0001_outbox")];
const HUB: &[Numbered] = &[
    migration!("sqlite", "hub", "0001_log"),
    migration!("sqlite", "hub", "0002_dead_letters"),
    migration!("sqlite", "hub", "0003_registry"),
];

/// Each outbox table has its own history, because a database may hold several.
pub(super) fn outbox(table: &TableName) -> Migrator {
    migrator(OUTBOX, format!("{table}_migration"), |sql| sql.replace("{table}", table.as_str()))
}

pub(super) fn hub() -> Migrator {
    migrator(HUB, "posthaste_migration".to_owned(), str::to_owned)
}
