use std::borrow::Cow;

use sqlx::AssertSqlSafe;
use sqlx::SqlSafeStr;
use sqlx::migrate::{Migration, MigrationType, Migrator};

use crate::TableName;

macro_rules! migration {
    ($set:literal, $name:literal) => {
        (
            $name,
            include_str!(concat!("../../migrations/sqlite/", $set, "/", $name, ".up.sql")),
            include_str!(concat!("../../migrations/sqlite/", $set, "/", $name, ".down.sql")),
        )
    };
}

type Numbered = (&'static str, &'static str, &'static str);

/// In these, `{table}` stands for the name of the outbox table.
const OUTBOX: &[Numbered] = &[migration!("outbox", "0001_outbox")];
const HUB: &[Numbered] =
    &[migration!("hub", "0001_log"), migration!("hub", "0002_dead_letters"), migration!("hub", "0003_registry")];

/// Each outbox table has its own history, because a database may hold several.
pub(super) fn outbox(table: &TableName) -> Migrator {
    migrator(OUTBOX, format!("{table}_migration"), |sql| sql.replace("{table}", table.as_str()))
}

pub(super) fn hub() -> Migrator {
    migrator(HUB, "posthaste_migration".to_owned(), str::to_owned)
}

/// A history table of our own: the service whose database this is may keep its migrations with sqlx, too.
fn migrator(numbered: &[Numbered], history: String, fill: impl Fn(&str) -> String) -> Migrator {
    let mut migrations = Vec::new();
    for (name, up, down) in numbered {
        let (version, description) = name.split_once('_').unwrap_or((name, ""));
        let version = version.parse().unwrap_or(0);
        for (kind, sql) in [(MigrationType::ReversibleUp, up), (MigrationType::ReversibleDown, down)] {
            let sql = AssertSqlSafe(fill(sql)).into_sql_str();
            migrations.push(Migration::new(version, Cow::Owned(description.to_owned()), kind, sql, false));
        }
    }
    let mut migrator = Migrator::with_migrations(migrations);
    migrator.dangerous_set_table_name(history);
    migrator
}
