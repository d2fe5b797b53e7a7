use sqlx::migrate::Migrator;

use crate::TableName;
use crate::migrations::{Numbered, migration, migrator};

/// In these, `{table}` stands for the name of the outbox table.
const OUTBOX: &[Numbered] = &[migration!("postgres", "outbox", "0001_outbox")];

/// Each outbox table has its own history, because a database may hold several.
pub(super) fn outbox(table: &TableName) -> Migrator {
    migrator(OUTBOX, format!("{table}_migration"), |sql| sql.replace("{table}", table.as_str()))
}
