use std::borrow::Cow;
use std::future::Future;

use posthaste_core::outbox::{OpenError, TableName};
use sqlx::AssertSqlSafe;
use sqlx::SqlSafeStr;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};

/// The name of a migration, its way up and its way down.
pub(crate) type Numbered = (&'static str, &'static str, &'static str);

/// The migration of this name from the folder of this database and set.
macro_rules! migration {
    ($database:literal, $set:literal, $name:literal) => {
        (
            $name,
            include_str!(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/migrations/",
                $database,
                "/",
                $set,
                "/",
                $name,
                ".up.sql"
            )),
            include_str!(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/migrations/",
                $database,
                "/",
                $set,
                "/",
                $name,
                ".down.sql"
            )),
        )
    };
}
pub(crate) use migration;

/// One migration, to be read by a person or run by another tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigrationText {
    /// Its number and what it is about.
    pub name: &'static str,
    /// The way there.
    pub up: String,
    /// The way back.
    pub down: String,
}

#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
pub(crate) fn texts(numbered: &[Numbered], fill: impl Fn(&str) -> String) -> Vec<MigrationText> {
    numbered.iter().map(|(name, up, down)| MigrationText { name, up: fill(up), down: fill(down) }).collect()
}

/// A history table of our own: the service whose database this is may keep its migrations with sqlx, too.
pub(crate) fn migrator(numbered: &[Numbered], history: String, fill: impl Fn(&str) -> String) -> Migrator {
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

pub(crate) fn newest(migrator: &Migrator) -> i64 {
    migrator.iter().map(|migration| migration.version).max().unwrap_or(0)
}

/// Runs the migrations of an outbox table where `found`, the newest that was made, is not the newest there is: who finds
/// the table up to date need not be allowed to create one.
pub(crate) async fn bring_up(
    migrator: &Migrator,
    table: &TableName,
    found: Option<i64>,
    run: impl Future<Output = Result<(), MigrateError>>,
) -> Result<(), OpenError> {
    let known = newest(migrator);
    match found {
        Some(found) if found == known => Ok(()),
        Some(found) if found > known => Err(OpenError::NewerSchema { table: table.clone(), found, known }),
        _ => run.await.map_err(|error| OpenError::Migration { table: table.clone(), source: error.into() }),
    }
}
