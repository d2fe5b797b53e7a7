use std::borrow::Cow;

use sqlx::AssertSqlSafe;
use sqlx::SqlSafeStr;
use sqlx::migrate::{Migration, MigrationType, Migrator};

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
