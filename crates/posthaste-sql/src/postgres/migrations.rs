use posthaste_core::outbox::{Mode, OpenError, TableName};
use posthaste_core::{StoreError, hub_store};
use sqlx::migrate::Migrator;
use sqlx::{AssertSqlSafe, PgPool};

use super::errors::{doing, store_error};
use crate::migrations::{Dialect, MigrationText, Numbered, migration, migrator, newest};
use crate::table_sql::fill_table;

pub(super) const DIALECT: Dialect = Dialect {
    outbox: &[migration!("postgres", "outbox", "0001_outbox")],
    ordered: &[migration!("postgres", "ordered", "0001_ordered")],
    inbox: &[migration!("postgres", "inbox", "0001_inbox")],
    fill,
    time: "TIMESTAMPTZ NOT NULL DEFAULT now()",
    bytes: "BYTEA",
    hex: ("'\\x", "'"),
};

const HUB: &[Numbered] = &[migration!("postgres", "hub", "0001_log"), migration!("postgres", "hub", "0002_schemas")];

/// The tables of the hub: so far the log and the schemas.
pub(super) fn hub() -> Migrator {
    migrator(HUB, "posthaste_migration".to_owned(), str::to_owned)
}

/// Brings the hub tables up to date. A user without the right to create tables may call it if they are.
pub async fn migrate_hub(pool: &PgPool) -> Result<(), hub_store::OpenError> {
    check_encoding(pool).await?;
    let migrator = hub();
    let known = newest(&migrator);
    match newest_applied(pool, &migrator).await? {
        Some(found) if found == known => Ok(()),
        Some(found) if found > known => Err(hub_store::OpenError::NewerSchema { found, known }),
        _ => migrator.run(pool).await.map_err(|error| hub_store::OpenError::Migration(error.into())),
    }
}

/// Refuses a database that cannot store every text.
pub(super) async fn check_encoding(pool: &PgPool) -> Result<(), OpenError> {
    let encoding = sqlx::query_scalar("SELECT current_setting('server_encoding')").fetch_one(pool);
    let encoding: String = encoding.await.map_err(|error| store_error("open the database", error))?;
    if encoding == "UTF8" {
        return Ok(());
    }
    let problem = format!("database has the encoding {encoding}");
    Err(OpenError::Unsuitable { problem, remedy: "create it with ENCODING 'UTF8'".to_owned() })
}

/// The newest migration that was applied.
pub(super) async fn newest_applied(pool: &PgPool, migrator: &Migrator) -> Result<Option<i64>, StoreError> {
    let history = &*migrator.table_name;
    let read = async {
        let is_there = sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL").bind(history);
        if !is_there.fetch_one(pool).await? {
            return Ok(None);
        }
        let newest = AssertSqlSafe(format!("SELECT max(version) FROM {history}"));
        Ok(sqlx::query_scalar(newest).fetch_one(pool).await?)
    };
    doing("read the migration history", read).await
}

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
