use chrono::{DateTime, Utc};
use posthaste_core::hub_store::Schema;
use sqlx::migrate::Migrator;

use super::newest;

/// A row of a migration history.
pub(crate) struct Applied {
    pub(crate) number: i64,
    pub(crate) description: String,
    pub(crate) at: Option<DateTime<Utc>>,
}

const BEFORE: &str = " (compatible with ";
const AFTER: &str = ")";

/// The description of a migration in the history. It also says with which programs the migration is compatible: sqlx
/// writes it in the transaction of the migration, on every database, and reverts it with the migration.
pub(super) fn description(subject: &str, compatible_with: Option<i64>) -> String {
    match compatible_with {
        Some(oldest) => format!("{subject}{BEFORE}{oldest}{AFTER}"),
        None => subject.to_owned(),
    }
}

impl Applied {
    pub(super) fn subject(&self) -> &str {
        self.parts().map_or(&self.description, |(subject, _)| subject)
    }

    fn parts(&self) -> Option<(&str, i64)> {
        let (subject, oldest) = self.description.strip_suffix(AFTER)?.rsplit_once(BEFORE)?;
        Some((subject, oldest.parse().ok()?))
    }
}

/// The schema with this history, as a program with these migrations sees it.
pub(crate) fn schema_of(applied: &[Applied], migrator: &Migrator) -> Schema {
    let compatible_with = |applied: &Applied| applied.parts().map(|(_, oldest)| oldest);
    Schema::judge(applied.iter().map(|applied| (applied.number, compatible_with(applied))), newest(migrator))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_says_with_which_programs_the_migration_is_compatible() {
        let read = |description: &str| {
            let applied = Applied { number: 7, description: description.to_owned(), at: None };
            (applied.subject().to_owned(), applied.parts().map(|(_, oldest)| oldest))
        };
        assert_eq!(read(&description("log", None)), ("log".to_owned(), None));
        assert_eq!(read(&description("log", Some(5))), ("log".to_owned(), Some(5)));
        assert_eq!(read("log (of all)"), ("log (of all)".to_owned(), None));
    }
}
