use std::borrow::Cow;
use std::future::Future;

use posthaste_core::hub_store::{Fit, Schema};
use posthaste_core::outbox::{Mode, OpenError, TableName};
use sqlx::AssertSqlSafe;
use sqlx::SqlSafeStr;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};

#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod catalog;
mod history;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod hub;

#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) use catalog::missing;
pub(crate) use history::{Applied, schema_of};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) use hub::{apply, deleted_tables, list, newer, revert};

/// The beginning of a migration that cannot run in a transaction: on PostgreSQL, one that builds an index concurrently. It
/// has that one statement, with IF NOT EXISTS, so that it can be run again after a crash.
pub(crate) const NO_TRANSACTION: &str = "-- no-transaction";

/// The history of the tables of a hub.
pub(crate) const HUB_HISTORY: &str = "posthaste_migration";

/// A migration in a folder of this crate.
pub(crate) struct Numbered {
    /// Its number and subject, such as `0001_outbox`.
    pub(crate) name: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    /// The oldest schema whose programs work with the database after it. `None`: only programs that know it do.
    pub(crate) compatible_with: Option<i64>,
}

/// The migration of this name from the folder of this database and set.
macro_rules! migration {
    ($database:literal, $set:literal, $name:literal) => {
        crate::migrations::migration!($database, $set, $name, None)
    };
    ($database:literal, $set:literal, $name:literal, compatible_with $oldest:literal) => {
        crate::migrations::migration!($database, $set, $name, Some($oldest))
    };
    ($database:literal, $set:literal, $name:literal, $compatible_with:expr) => {
        crate::migrations::Numbered {
            name: $name,
            up: include_str!(crate::migrations::migration!(path $database, $set, $name, ".up.sql")),
            down: include_str!(crate::migrations::migration!(path $database, $set, $name, ".down.sql")),
            compatible_with: $compatible_with,
        }
    };
    (path $database:literal, $set:literal, $name:literal, $direction:literal) => {
        concat!(env!("CARGO_MANIFEST_DIR"), "/migrations/", $database, "/", $set, "/", $name, $direction)
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

impl MigrationText {
    /// True if its SQL, up and down, should run in a transaction, so that nothing stays of it if a statement fails. False if
    /// a statement cannot run in a transaction.
    pub fn is_transactional(&self) -> bool {
        !self.up.starts_with(NO_TRANSACTION)
    }
}

/// The migrations of one database. In their text, `{table}` stands for the name of the outbox or inbox table.
pub(crate) struct Dialect {
    pub(crate) outbox: &'static [Numbered],
    /// The additional migrations of ordered mode.
    pub(crate) ordered: &'static [Numbered],
    pub(crate) inbox: &'static [Numbered],
    /// All tables of a hub; empty on a database that cannot hold one. `{up of NAME}` and `{down of NAME}` stand for the
    /// text of the outbox migration of this name, with its history.
    pub(crate) hub: &'static [Numbered],
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

    /// The migrations of an outbox table that is read in this mode.
    pub(crate) fn of_outbox(&self, table: &TableName, mode: Mode) -> Vec<Migrator> {
        let ordered = matches!(mode, Mode::Ordered(_)).then(|| self.ordered(table));
        [self.outbox(table)].into_iter().chain(ordered).collect()
    }

    /// The tables of a hub.
    pub(crate) fn hub(&self) -> Migrator {
        migrator(self.hub, HUB_HISTORY.to_owned(), |sql| self.fill_outbox(sql))
    }

    /// The migrations of a hub as text. The first one, reverted, also deletes the history.
    pub(crate) fn hub_texts(&self) -> Vec<MigrationText> {
        let mut texts = self.texts_of(self.hub, HUB_HISTORY, |sql| self.fill_outbox(sql));
        if let Some(first) = texts.first_mut() {
            first.down += &format!("DROP TABLE {HUB_HISTORY};\n");
        }
        texts
    }

    fn fill_outbox(&self, sql: &str) -> String {
        // The mode of a hub differs from database to database. None of them adds a migration.
        self.texts(&TableName::default(), Mode::MultiNode).iter().fold(
            sql.to_owned(),
            |sql, MigrationText { name, up, down }| {
                sql.replace(&format!("{{up of {name}}}"), up).replace(&format!("{{down of {name}}}"), down)
            },
        )
    }

    /// The migrations of an outbox table as text.
    pub(crate) fn texts(&self, table: &TableName, mode: Mode) -> Vec<MigrationText> {
        let fill = |sql: &str| (self.fill)(sql, table);
        let mut texts = self.texts_of(self.outbox, &outbox_history(table), fill);
        if matches!(mode, Mode::Ordered(_)) {
            texts.extend(self.texts_of(self.ordered, &ordered_history(table), fill));
        }
        texts
    }

    fn texts_of(&self, numbered: &[Numbered], history: &str, fill: impl Fn(&str) -> String) -> Vec<MigrationText> {
        let migrator = migrator(numbered, history.to_owned(), &fill);
        let text = |Numbered { name, up, down, .. }: &Numbered| {
            let version = version_of(name).0;
            let is_up = |migration: &&Migration| {
                migration.version == version && migration.migration_type == MigrationType::ReversibleUp
            };
            let record = migrator.iter().find(is_up).map(|up| self.record(history, up)).unwrap_or_default();
            let forget = format!("\nDELETE FROM {history} WHERE version = {version};\n");
            MigrationText { name, up: fill(up) + &record, down: fill(down) + &forget }
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
    for Numbered { name, up, down, compatible_with } in numbered {
        let (version, subject) = version_of(name);
        let description = history::description(subject, *compatible_with);
        for (kind, sql) in [(MigrationType::ReversibleUp, up), (MigrationType::ReversibleDown, down)] {
            let no_tx = sql.starts_with(NO_TRANSACTION);
            let sql = AssertSqlSafe(fill(sql)).into_sql_str();
            migrations.push(Migration::new(version, Cow::Owned(description.clone()), kind, sql, no_tx));
        }
    }
    let mut migrator = Migrator::with_migrations(migrations);
    migrator.dangerous_set_table_name(history);
    migrator
}

pub(crate) fn newest(migrator: &Migrator) -> i64 {
    migrator.iter().map(|migration| migration.version).max().unwrap_or(0)
}

/// Fails unless this program works with a table with this history.
pub(crate) fn check_current(migrator: &Migrator, table: &TableName, applied: &[Applied]) -> Result<(), OpenError> {
    let (table, Schema { found, known, fit }) = (table.clone(), schema_of(applied, migrator));
    match fit {
        Fit::Works => Ok(()),
        Fit::TooNew => Err(OpenError::NewerSchema { table, found: found.unwrap_or_default(), known }),
        Fit::Behind => Err(OpenError::OldSchema { table, found, known }),
    }
}

/// Runs the migrations of a table if any is pending, by its history. So a database user without the right to create tables
/// can open a table that is up to date, and an older program a table that a newer one has changed compatibly.
pub(crate) async fn bring_up(
    migrator: &Migrator,
    table: &TableName,
    applied: &[Applied],
    run: impl Future<Output = Result<(), MigrateError>>,
) -> Result<(), OpenError> {
    match check_current(migrator, table, applied) {
        Err(OpenError::OldSchema { table, .. }) => {
            run.await.map_err(|error| OpenError::Migration { table, source: error.into() })
        }
        checked => checked,
    }
}
