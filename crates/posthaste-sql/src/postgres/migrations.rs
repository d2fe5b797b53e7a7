use chrono::{DateTime, Utc};
use posthaste_core::StoreError;
use posthaste_core::outbox::{Mode, OpenError, TableName};
use sqlx::migrate::Migrator;
use sqlx::{AssertSqlSafe, PgExecutor, PgPool};

use super::errors::{doing, store_error};
use crate::migrations::{Applied, Dialect, MigrationText, migration};
use crate::table_sql::fill_table;

pub(super) const DIALECT: Dialect = Dialect {
    outbox: &[migration!("postgres", "outbox", "0001_outbox")],
    ordered: &[migration!("postgres", "ordered", "0001_ordered")],
    inbox: &[migration!("postgres", "inbox", "0001_inbox")],
    hub: &[
        migration!("postgres", "hub", "0001_log"),
        migration!("postgres", "hub", "0002_schemas"),
        migration!("postgres", "hub", "0003_dead_letters"),
        migration!("postgres", "hub", "0004_registry"),
        migration!("postgres", "hub", "0005_channels"),
        migration!("postgres", "hub", "0006_outbox", compatible_with 5),
        migration!("postgres", "hub", "0007_channel_pause", compatible_with 5),
        migration!("postgres", "hub", "0008_subscription_filter", compatible_with 5),
        migration!("postgres", "hub", "0009_audit", compatible_with 5),
    ],
    fill,
    time: "TIMESTAMPTZ NOT NULL DEFAULT now()",
    bytes: "BYTEA",
    hex: ("'\\x", "'"),
};

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

/// The history of these migrations; empty if none was applied.
pub(super) async fn applied(pool: &PgPool, migrator: &Migrator) -> Result<Vec<Applied>, StoreError> {
    let history = &*migrator.table_name;
    let read = async {
        if !exists(pool, history).await? {
            return Ok(Vec::new());
        }
        let rows = AssertSqlSafe(format!("SELECT version, description, installed_on FROM {history} ORDER BY version"));
        let rows: Vec<(i64, String, DateTime<Utc>)> = sqlx::query_as(rows).fetch_all(pool).await?;
        Ok(rows.into_iter().map(|(number, description, at)| Applied { number, description, at: Some(at) }).collect())
    };
    doing("read the migration history", read).await
}

pub(super) async fn exists(database: impl PgExecutor<'_>, table: &str) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL").bind(table).fetch_one(database).await
}

/// The migrations of an outbox table of this name for this mode, as text. A person can read them, and a user with the
/// right to create tables can run them. After that, the service needs only the rights to read and write the tables.
pub fn migrations(table: &TableName, mode: Mode) -> Vec<MigrationText> {
    DIALECT.texts(table, mode)
}

/// The migrations of a hub, as text. After a user with the right to create tables has run them, the servers need only the
/// rights to read and write the tables.
pub fn hub_migrations() -> Vec<MigrationText> {
    DIALECT.hub_texts()
}

/// Fills in the name of a table in lower case, as PostgreSQL reads a name without quotes. So a service and other
/// programs mean the same table, however they spell its name.
pub(super) fn fill(sql: &str, table: &TableName) -> String {
    fill_table(sql, &table.to_lowercase(), '"')
}
