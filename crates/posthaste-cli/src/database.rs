//! The database of a configuration. Only this module names a particular database.
//!
//! All other modules use [`HubDatabase`]. Another database adds another arm to each function here.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use posthaste_core::hub_store::{HubDatabase, OpenError};
use posthaste_core::outbox::{Mode, TableName};
use posthaste_sql::sources::SourceTable;
use posthaste_sql::{DatabaseKind, MigrationText, postgres, sqlite};

use crate::config::Database;

/// The fewest connections that a server can work with.
pub const MIN_CONNECTIONS: u32 = postgres::MIN_CONNECTIONS;

/// Opens the database for a server. Fails if the database is exclusive and another server uses it.
pub async fn open(database: &Database) -> Result<Arc<dyn HubDatabase>, OpenError> {
    match is_server(&database.url) {
        true => connect(database).await,
        false => Ok(Arc::new(sqlite::HubDatabase::open(&database.url).await?)),
    }
}

/// Opens an existing database for inspection, even while a server uses it. Returns `None` if it does not exist and a
/// server would create it.
pub async fn open_existing(database: &Database) -> Result<Option<Arc<dyn HubDatabase>>, OpenError> {
    match is_server(&database.url) {
        true => connect(database).await.map(Some),
        false if file(&database.url).exists() => {
            Ok(Some(Arc::new(sqlite::HubDatabase::open_shared(&database.url).await?)))
        }
        false => Ok(None),
    }
}

async fn connect(database: &Database) -> Result<Arc<dyn HubDatabase>, OpenError> {
    Ok(Arc::new(postgres::HubDatabase::open(&database.url, database.max_connections).await?))
}

/// The name of the database in messages: its file, or its address without user and password.
pub fn name(url: &str) -> String {
    match is_server(url) {
        true => postgres::HubDatabase::name(url).unwrap_or_default(),
        false => file(url).display().to_string(),
    }
}

/// Identifies the database: an address without user and password, or the full path of a file.
pub fn place(url: &str) -> String {
    let table = SourceTable::new(url, TableName::default(), Mode::MultiNode);
    table.map(|table| table.database_name()).unwrap_or_default()
}

/// The key file to use if the configuration names none; `None` if there is no file beside which it could be.
pub fn default_key_file(url: &str) -> Option<PathBuf> {
    (!is_server(url)).then(|| sqlite::HubDatabase::key_file(&file(url)))
}

/// True if several servers may use the database at once. All of them need the same key.
pub fn is_shared(url: &str) -> bool {
    is_server(url)
}

/// The lock file of the server that uses the database, if a server does and the database is exclusive.
pub fn lock_of_running_server(url: &str) -> Option<PathBuf> {
    if is_server(url) {
        return None;
    }
    let file = file(url);
    sqlite::HubDatabase::is_in_use(&file).unwrap_or(false).then(|| sqlite::HubDatabase::lock_file(&file))
}

/// Checks that a new database could be created at this address, if a server would create one.
pub fn check_place(url: &str) -> Result<(), OpenError> {
    if is_server(url) {
        return Ok(());
    }
    let file = file(url);
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match tempfile::tempfile_in(folder) {
        Ok(_) => Ok(()),
        Err(source) => Err(sqlite::HubDatabase::unwritable(&file, source)),
    }
}

/// The migrations of a database at this address, as SQL.
pub fn migrations(url: &str) -> Vec<MigrationText> {
    match is_server(url) {
        true => postgres::hub_migrations(),
        false => sqlite::hub_migrations(),
    }
}

/// The beginning of a script for the program that runs SQL on this kind of database, and of each transaction in it. If a
/// statement fails, nothing of its transaction stays.
pub fn script(url: &str) -> (&'static str, &'static str) {
    match is_server(url) {
        true => (
            "-- Run it with: psql --set ON_ERROR_STOP=1 --file FILE DATABASE\n",
            "BEGIN;\n-- Statements on a busy table must not queue behind this one for long. If it fails, run it again.\n\
             SET LOCAL lock_timeout = '2s';",
        ),
        false => ("-- Run it with: sqlite3 DATABASE <FILE\n.bail on\n", "BEGIN IMMEDIATE;"),
    }
}

/// The reason why a server cannot use this database address, if there is one. It does not repeat the address, which may
/// contain a password.
pub fn refusal(url: &str) -> Option<String> {
    const WRITE: &str = "write sqlite://FILE, for example sqlite://posthaste.db, or postgres://USER@HOST/DATABASE";
    let why = match DatabaseKind::of_url(url) {
        Ok(DatabaseKind::Sqlite) if url.contains(":memory:") || url.contains("mode=memory") => {
            "is in memory, where nothing survives a restart"
        }
        Ok(DatabaseKind::Sqlite) if !file(url).as_os_str().is_empty() => return None,
        Ok(DatabaseKind::Postgres) if postgres::HubDatabase::name(url).is_some() => return None,
        Ok(DatabaseKind::MySql) => "names MySQL, on which there is no hub",
        _ => "is not the address of a database",
    };
    Some(format!("{why}: {WRITE}"))
}

/// True for the address of a database server; false for a file.
fn is_server(url: &str) -> bool {
    DatabaseKind::of_url(url) == Ok(DatabaseKind::Postgres)
}

/// The file of the database; empty for an address that [`refusal`] refuses.
fn file(url: &str) -> PathBuf {
    sqlite::file_of(url).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_are_not_a_database_are_refused() {
        for url in
            ["sqlite://posthaste.db", "postgres://me@host/hub", "postgresql://me:secret@host:5433/hub?sslmode=require"]
        {
            assert_eq!(refusal(url), None, "{url}");
        }
        for url in
            ["", "sqlite:", "sqlite::memory:", "mysql://me:secret@host/hub", "postgres://me:secret@host:port/hub"]
        {
            let why = refusal(url).unwrap();
            assert!(why.contains("sqlite://FILE") && why.contains("postgres://USER@HOST/DATABASE"), "{url}: {why}");
            assert!(!why.contains("secret"), "{why}");
        }
    }

    #[test]
    fn a_name_has_no_password() {
        assert_eq!(name("sqlite://folder/posthaste.db"), "folder/posthaste.db");
        assert_eq!(name("postgresql://me:secret@host/hub?sslmode=require"), "postgres://host:5432/hub");
    }
}
