use async_trait::async_trait;
use chrono::{DateTime, Utc};

use super::OpenError;
use crate::StoreError;

/// The migrations of the database of a hub, for operators. They have the numbers 1, 2, 3 and so on; the schema of a
/// database has the number of the newest one that was applied.
#[async_trait]
pub trait Migrations: Send + Sync {
    /// The schema of the database and the schema that this program knows. Changes nothing.
    async fn schema(&self) -> Result<Schema, StoreError>;

    /// The migrations that this program knows, and those that were applied, by number. Changes nothing.
    async fn list(&self) -> Result<Vec<Migration>, StoreError>;

    /// Applies the pending migrations up to this number, each once, even if several processes call it at the same time.
    /// A call that is cut off has applied each migration whole or not at all, and the next call continues.
    async fn up(&self, to: i64) -> Result<(), OpenError>;

    /// Reverts the applied migrations above this number, newest first. 0 leaves nothing of Posthaste.
    async fn down(&self, to: i64) -> Result<(), OpenError>;

    /// The tables that [`down`](Self::down) would delete, with the number of their rows. Changes nothing.
    async fn tables_above(&self, to: i64) -> Result<Vec<TableRows>, StoreError>;

    /// The tables, columns, indexes, triggers and functions of this program's schema that the database does not have, or
    /// has in another form, each in words. Changes nothing.
    async fn missing(&self) -> Result<Vec<String>, StoreError>;
}

/// One migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration {
    /// Its number.
    pub number: i64,
    /// Its subject.
    pub name: String,
    /// Whether and when it was applied.
    pub state: MigrationState,
    /// False if only a newer program knows it.
    pub is_known: bool,
}

/// Whether a migration was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MigrationState {
    /// It was not applied.
    Pending,
    /// It was applied, at this time if the history has one that can be read.
    Applied(Option<DateTime<Utc>>),
}

/// A table and its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableRows {
    /// The name of the table.
    pub table: String,
    /// How many rows it has.
    pub rows: i64,
}

/// The schema of a database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schema {
    /// The newest migration that was applied; `None` if the database has no tables of Posthaste.
    pub found: Option<i64>,
    /// The newest migration that this program knows.
    pub known: i64,
    /// Whether this program can work with it.
    pub fit: Fit,
}

/// Whether a program can work with a schema.
///
/// A migration records the oldest schema whose programs still work with the database after it. So servers of the
/// previous release continue, and start, beside servers of the next one. A program that is older than a migration that
/// records nothing does not work with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// Migrations of this program are pending.
    Behind,
    /// It is the schema of this program, or a newer one that this program works with.
    Works,
    /// It is newer, and this program does not work with it.
    TooNew,
}

impl Schema {
    /// Judges a schema by its applied migrations: the number of each, and the oldest schema whose programs it works with.
    pub fn judge(applied: impl IntoIterator<Item = (i64, Option<i64>)>, known: i64) -> Self {
        let mut schema = Self { found: None, known, fit: Fit::Works };
        for (number, compatible_with) in applied {
            schema.found = schema.found.max(Some(number));
            if number > known && compatible_with.is_none_or(|oldest| known < oldest) {
                schema.fit = Fit::TooNew;
            }
        }
        if schema.found.is_none_or(|found| found < known) {
            schema.fit = Fit::Behind;
        }
        schema
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_program_works_with_newer_migrations_that_are_compatible_with_it() {
        let fit = |newer: &[(i64, Option<i64>)]| {
            let applied = [(1, None), (2, Some(1))].into_iter().chain(newer.iter().copied());
            Schema::judge(applied, 2).fit
        };
        assert_eq!(fit(&[]), Fit::Works);
        assert_eq!(fit(&[(3, Some(2)), (4, Some(1))]), Fit::Works);
        assert_eq!(fit(&[(3, Some(2)), (4, Some(3))]), Fit::TooNew);
        assert_eq!(fit(&[(3, Some(3)), (4, Some(2))]), Fit::TooNew, "the strictest migration decides");
        assert_eq!(fit(&[(3, None)]), Fit::TooNew);
        assert_eq!(Schema::judge([(1, None)], 2), Schema { found: Some(1), known: 2, fit: Fit::Behind });
        assert_eq!(Schema::judge([], 2), Schema { found: None, known: 2, fit: Fit::Behind });
    }
}
