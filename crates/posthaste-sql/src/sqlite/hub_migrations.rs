use std::sync::Arc;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{Fit, Migration, Migrations, OpenError, Schema, TableRows};
use sqlx::migrate::{MigrateError, Migrator};
use sqlx::{AssertSqlSafe, SqliteConnection};

use super::errors::{doing, store_error};
use super::migrations::DIALECT;
use super::{Database, HubDatabase};
use crate::migrations::{HUB_HISTORY, apply, deleted_tables, list, missing, newer, newest, revert, schema_of};

/// The migration that creates the outbox table.
const OUTBOX: i64 = 5;

/// The schema that was just migrated, line by line as [`CATALOG`] reads it.
const EXPECTED: &str = include_str!("../../migrations/sqlite/hub/schema.txt");

const CATALOG: &str = "
    SELECT 'column ' || tables.name || '.' || columns.name || ' ' || lower(columns.type)
        || iif(columns.\"notnull\", ' not null', '') AS line
    FROM sqlite_schema AS tables, pragma_table_xinfo(tables.name) AS columns
    WHERE tables.type = 'table' AND tables.name NOT LIKE 'sqlite\\_%' ESCAPE '\\'
    UNION ALL
    SELECT type || ' ' || tbl_name || '.' || name FROM sqlite_schema
    WHERE type IN ('index', 'trigger') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'";

#[async_trait]
impl Migrations for HubDatabase {
    async fn schema(&self) -> Result<Schema, StoreError> {
        self.database().schema().await
    }

    async fn list(&self) -> Result<Vec<Migration>, StoreError> {
        let migrator = DIALECT.hub();
        Ok(list(&migrator, &self.database().applied(&migrator).await?))
    }

    async fn up(&self, to: i64) -> Result<(), OpenError> {
        self.database().up(to).await
    }

    async fn down(&self, to: i64) -> Result<(), OpenError> {
        let schema = self.database().schema().await?;
        if schema.found > Some(schema.known) {
            return Err(newer(schema));
        }
        self.database().run(Direction::Down(to)).await
    }

    async fn tables_above(&self, to: i64) -> Result<Vec<TableRows>, StoreError> {
        let database = self.database();
        let count = async {
            let mut tables = Vec::new();
            for table in deleted_tables(&DIALECT.hub(), to) {
                if database.exists(&table).await? {
                    let rows = AssertSqlSafe(format!("SELECT count(*) FROM {table}"));
                    let rows = sqlx::query_scalar(rows).fetch_one(database.operators()).await?;
                    tables.push(TableRows { rows, table });
                }
            }
            Ok(tables)
        };
        doing("count the rows of the tables", count).await
    }

    async fn missing(&self) -> Result<Vec<String>, StoreError> {
        Ok(missing(EXPECTED, &self.catalog().await?))
    }
}

impl HubDatabase {
    /// The tables, columns, indexes and triggers of the database, one a line.
    pub async fn catalog(&self) -> Result<Vec<String>, StoreError> {
        let lines = sqlx::query_scalar(CATALOG).fetch_all(self.database().operators()).await;
        let mut lines: Vec<String> = lines.map_err(|error| store_error("read the catalog of the database", error))?;
        lines.sort();
        Ok(lines)
    }
}

impl Database {
    /// Brings the tables of a hub up to date.
    pub async fn migrate_hub(&self) -> Result<(), OpenError> {
        self.up(newest(&DIALECT.hub())).await
    }

    async fn schema(&self) -> Result<Schema, StoreError> {
        let migrator = DIALECT.hub();
        Ok(schema_of(&self.applied(&migrator).await?, &migrator))
    }

    async fn up(&self, to: i64) -> Result<(), OpenError> {
        let schema = self.schema().await?;
        match schema.fit {
            Fit::Works => Ok(()),
            Fit::TooNew => Err(newer(schema)),
            Fit::Behind => self.run(Direction::Up(to)).await,
        }
    }

    async fn run(&self, direction: Direction) -> Result<(), OpenError> {
        let migrator = Arc::new(DIALECT.hub());
        self.writer().migrate(migrator.clone(), direction).await.map_err(|error| match error {
            // Another process was faster, and newer.
            MigrateError::VersionMissing(found) => OpenError::NewerSchema { found, known: newest(&migrator) },
            error => OpenError::Migration(error.into()),
        })
    }
}

/// What to do with the migrations of a hub or of an outbox table.
#[derive(Clone, Copy)]
pub(super) enum Direction {
    /// Apply those of an outbox or inbox table.
    Table,
    /// Apply those of a hub up to this number.
    Up(i64),
    /// Revert those of a hub above this number.
    Down(i64),
}

/// Runs migrations on a connection that is in a transaction.
pub(super) async fn migrate(
    connection: &mut SqliteConnection,
    migrator: &Migrator,
    direction: Direction,
) -> Result<(), MigrateError> {
    match direction {
        Direction::Table => migrator.run_direct(None, connection, false).await,
        Direction::Up(to) => {
            let exists = "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'outbox_event')";
            let exists: bool = sqlx::query_scalar(exists).fetch_one(&mut *connection).await?;
            apply(connection, migrator, to, exists.then_some(OUTBOX)).await
        }
        Direction::Down(to) => {
            revert(connection, migrator, to).await?;
            if to == 0 {
                let history = AssertSqlSafe(format!("DROP TABLE {HUB_HISTORY}"));
                sqlx::raw_sql(history).execute(&mut *connection).await?;
            }
            Ok(())
        }
    }
}
