//! The migrations of a hub, on one connection of any database.

use posthaste_core::hub_store::{Migration, MigrationState, OpenError, Schema};
use sqlx::migrate::{Migrate, MigrateError, Migrator};

use super::Applied;

/// The migrations that this program knows and those that were applied, by number.
pub(crate) fn list(migrator: &Migrator, applied: &[Applied]) -> Vec<Migration> {
    let mut all: Vec<Migration> = Vec::new();
    for known in migrator.iter().filter(|known| known.migration_type.is_up_migration()) {
        let subject = Applied { number: known.version, description: known.description.to_string(), at: None };
        let state = match applied.iter().find(|applied| applied.number == known.version) {
            Some(applied) => MigrationState::Applied(applied.at),
            None => MigrationState::Pending,
        };
        all.push(Migration { number: known.version, name: subject.subject().to_owned(), state, is_known: true });
    }
    for newer in applied.iter().filter(|applied| !migrator.version_exists(applied.number)) {
        let (number, name) = (newer.number, newer.subject().to_owned());
        all.push(Migration { number, name, state: MigrationState::Applied(newer.at), is_known: false });
    }
    all.sort_by_key(|migration| migration.number);
    all
}

/// The error for a schema that only newer programs can change.
pub(crate) fn newer(schema: Schema) -> OpenError {
    OpenError::NewerSchema { found: schema.found.unwrap_or_default(), known: schema.known }
}

/// Applies the pending migrations up to a number. `outbox` is the number of the migration that creates the outbox table,
/// if the table exists: earlier programs created it by themselves, so that migration is then only recorded.
pub(crate) async fn apply<C: Migrate>(
    connection: &mut C,
    migrator: &Migrator,
    to: i64,
    outbox: Option<i64>,
) -> Result<(), MigrateError> {
    if let Some(outbox) = outbox.filter(|outbox| *outbox <= to) {
        migrator.run_direct(Some(outbox - 1), connection, false).await?;
        migrator.run_direct(Some(outbox), connection, true).await?;
    }
    migrator.run_direct(Some(to), connection, false).await
}

/// Reverts the applied migrations above a number, newest first.
pub(crate) async fn revert<C: Migrate>(connection: &mut C, migrator: &Migrator, to: i64) -> Result<(), MigrateError> {
    let history = &migrator.table_name;
    connection.ensure_migrations_table(history).await?;
    let applied = connection.list_applied_migrations(history).await?;
    for migration in migrator.iter().rev().filter(|migration| migration.migration_type.is_down_migration()) {
        if migration.version > to && applied.iter().any(|applied| applied.version == migration.version) {
            connection.revert(history, migration).await?;
        }
    }
    Ok(())
}

/// The tables that a revert to this number deletes, without histories.
pub(crate) fn deleted_tables(migrator: &Migrator, to: i64) -> Vec<String> {
    let down =
        migrator.iter().filter(|migration| migration.migration_type.is_down_migration() && migration.version > to);
    let statements = down.flat_map(|migration| migration.sql.as_str().lines());
    let table = |line: &str| Some(line.strip_prefix("DROP TABLE ")?.trim_end_matches(';').trim_matches('"').to_owned());
    let mut tables: Vec<String> = statements.filter_map(table).filter(|table| !table.ends_with("_migration")).collect();
    tables.sort();
    tables
}
