use std::borrow::Cow;
use std::future::Future;

use posthaste_core::outbox::{Mode, OpenError, TableName};
use sqlx::AssertSqlSafe;
use sqlx::SqlSafeStr;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};

/// The name of a migration, its `up` text and its `down` text.
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

/// One migration as SQL text, for a person to read or for another tool to run. Both directions also update the
/// migration history. So a process that starts later finds the table up to date, and needs no right to create tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigrationText {
    /// Its number and subject, such as `0001_outbox`.
    pub name: &'static str,
    /// The SQL that applies it.
    pub up: String,
    /// The SQL that reverts it.
    pub down: String,
}

/// The migrations of one database. In their text, `{table}` stands for the name of the outbox or inbox table.
pub(crate) struct Dialect {
    pub(crate) outbox: &'static [Numbered],
    /// The additional migrations of ordered mode.
    pub(crate) ordered: &'static [Numbered],
    pub(crate) inbox: &'static [Numbered],
    /// Fills in the name of a table.
    pub(crate) fill: fn(&str, &TableName) -> String,
    /// The column types of a time (with its default) and of bytes, as sqlx creates its history table.
    pub(crate) time: &'static str,
    pub(crate) bytes: &'static str,
    /// The parts of a literal of bytes before and after its hexadecimal digits.
    pub(crate) hex: (&'static str, &'static str),
}

impl Dialect {
    /// Each outbox table has a history of its own, because a database may hold several.
    pub(crate) fn outbox(&self, table: &TableName) -> Migrator {
        migrator(self.outbox, outbox_history(table), |sql| (self.fill)(sql, table))
    }

    pub(crate) fn ordered(&self, table: &TableName) -> Migrator {
        migrator(self.ordered, ordered_history(table), |sql| (self.fill)(sql, table))
    }

    pub(crate) fn inbox(&self, table: &TableName) -> Migrator {
        migrator(self.inbox, outbox_history(table), |sql| (self.fill)(sql, table))
    }

    /// The migrations of an outbox table as text.
    pub(crate) fn texts(&self, table: &TableName, mode: Mode) -> Vec<MigrationText> {
        let mut texts = self.texts_of(self.outbox, &outbox_history(table), table);
        if matches!(mode, Mode::Ordered(_)) {
            texts.extend(self.texts_of(self.ordered, &ordered_history(table), table));
        }
        texts
    }

    fn texts_of(&self, numbered: &[Numbered], history: &str, table: &TableName) -> Vec<MigrationText> {
        let migrator = migrator(numbered, history.to_owned(), |sql| (self.fill)(sql, table));
        let text = |(name, up, down): &Numbered| {
            let version = version_of(name).0;
            let is_up = |migration: &&Migration| {
                migration.version == version && migration.migration_type == MigrationType::ReversibleUp
            };
            let record = migrator.iter().find(is_up).map(|up| self.record(history, up)).unwrap_or_default();
            let forget = format!("\nDELETE FROM {history} WHERE version = {version};\n");
            MigrationText { name, up: (self.fill)(up, table) + &record, down: (self.fill)(down, table) + &forget }
        };
        numbered.iter().map(text).collect()
    }

    /// The SQL that adds a migration to the history, as sqlx does when it runs one.
    fn record(&self, history: &str, migration: &Migration) -> String {
        let Self { time, bytes, hex: (before, after), .. } = self;
        let (version, description) = (migration.version, &migration.description);
        let checksum: String = migration.checksum.iter().map(|byte| format!("{byte:02x}")).collect();
        format!(
            "
-- The migration history. A process reads it when it starts, and finds that no migration is left to run.
CREATE TABLE IF NOT EXISTS {history} (
    version        BIGINT PRIMARY KEY,
    description    TEXT NOT NULL,
    installed_on   {time},
    success        BOOLEAN NOT NULL,
    checksum       {bytes} NOT NULL,
    execution_time BIGINT NOT NULL
);
INSERT INTO {history} (version, description, success, checksum, execution_time)
VALUES ({version}, '{description}', TRUE, {before}{checksum}{after}, -1);
"
        )
    }
}

fn outbox_history(table: &TableName) -> String {
    format!("{table}_migration")
}

fn ordered_history(table: &TableName) -> String {
    format!("{table}_ordered")
}

/// The number and the description in the name of a migration.
fn version_of(name: &'static str) -> (i64, &'static str) {
    let (version, description) = name.split_once('_').unwrap_or((name, ""));
    (version.parse().unwrap_or(0), description)
}

/// The history table is our own, because the service may keep its own migrations in the same database with sqlx.
pub(crate) fn migrator(numbered: &[Numbered], history: String, fill: impl Fn(&str) -> String) -> Migrator {
    let mut migrations = Vec::new();
    for (name, up, down) in numbered {
        let (version, description) = version_of(name);
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

/// Runs the migrations of a table unless `found`, the newest one that was applied, is the newest one that exists. So a
/// database user without the right to create tables can open a table that is up to date.
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
