use std::fmt;

/// A kind of database that can hold an outbox.
///
/// To add a database, implement [`Store`](posthaste_core::outbox::Store) in a module of this crate, and
/// [`HubDatabase`](posthaste_core::hub_store::HubDatabase) if a hub may use it. The laws of both traits are tests in
/// `posthaste-backend-tests`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatabaseKind {
    /// PostgreSQL.
    Postgres,
    /// MySQL, MariaDB, and databases that speak their protocol.
    MySql,
    /// SQLite.
    Sqlite,
}

/// A URL that names no database of a known kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "database URL begins with {scheme:?}, which is none of postgres://, postgresql://, mysql://, mariadb://, tidb:// and sqlite:"
)]
pub struct UnknownDatabase {
    scheme: String,
}

impl DatabaseKind {
    /// The kind of database that the scheme of a URL names, in upper or lower case.
    pub fn of_url(url: &str) -> Result<Self, UnknownDatabase> {
        // An error repeats nothing after the scheme: the rest of the URL may contain a password.
        let scheme: String = url.split(':').next().unwrap_or_default().chars().take(32).collect();
        match scheme.to_ascii_lowercase().as_str() {
            "postgres" | "postgresql" => Ok(Self::Postgres),
            "mysql" | "mariadb" | "tidb" => Ok(Self::MySql),
            "sqlite" => Ok(Self::Sqlite),
            _ => Err(UnknownDatabase { scheme }),
        }
    }
}

impl fmt::Display for DatabaseKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Postgres => "PostgreSQL",
            Self::MySql => "MySQL/MariaDB",
            Self::Sqlite => "SQLite",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheme_of_a_url_names_the_kind_of_database() {
        for (url, kind) in [
            ("postgres://u@h/d", DatabaseKind::Postgres),
            ("PostgreSQL://h/d", DatabaseKind::Postgres),
            ("mysql://h/d", DatabaseKind::MySql),
            ("MARIADB://h/d", DatabaseKind::MySql),
            ("tidb://h/d", DatabaseKind::MySql),
            ("sqlite://file.db", DatabaseKind::Sqlite),
            ("sqlite::memory:", DatabaseKind::Sqlite),
        ] {
            assert_eq!(DatabaseKind::of_url(url), Ok(kind), "{url}");
        }
        for url in ["", "oracle://h", "jdbc:mysql://h/d", "host=localhost password=secret"] {
            let error = DatabaseKind::of_url(url).unwrap_err().to_string();
            assert!(error.contains("postgres://") && error.contains("sqlite:"), "{error}");
        }
    }
}
