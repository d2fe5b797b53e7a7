//! The database of a configuration. Only this module names a particular database.
//!
//! All other modules use [`HubDatabase`]. A second database adds a second arm to each function here.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use posthaste_core::hub_store::{HubDatabase, OpenError, Schema};
use posthaste_sql::sqlite;

/// Opens the database for a server. Fails if another server uses it.
pub async fn open(url: &str) -> Result<Arc<dyn HubDatabase>, OpenError> {
    Ok(Arc::new(sqlite::HubDatabase::open(url).await?))
}

/// Opens an existing database for inspection, even while a server uses it. Returns `None` if it does not exist.
pub async fn open_existing(url: &str) -> Result<Option<Arc<dyn HubDatabase>>, OpenError> {
    match file(url).exists() {
        true => Ok(Some(Arc::new(sqlite::HubDatabase::open_shared(url).await?))),
        false => Ok(None),
    }
}

/// The name of the database in messages: its file.
pub fn name(url: &str) -> String {
    file(url).display().to_string()
}

/// The key file to use if the configuration names none.
pub fn default_key_file(url: &str) -> PathBuf {
    sqlite::HubDatabase::key_file(&file(url))
}

/// The lock file of the server that uses the database, if a server does.
pub fn lock_of_running_server(url: &str) -> Option<PathBuf> {
    let file = file(url);
    sqlite::HubDatabase::is_in_use(&file).unwrap_or(false).then(|| sqlite::HubDatabase::lock_file(&file))
}

/// Checks that a new database could be created at this address.
pub fn check_place(url: &str) -> Result<(), OpenError> {
    let file = file(url);
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match tempfile::tempfile_in(folder) {
        Ok(_) => Ok(()),
        Err(source) => Err(sqlite::HubDatabase::unwritable(&file, source)),
    }
}

/// Fails if a newer version of the program created the schema.
pub fn check_schema(schema: Schema) -> Result<(), OpenError> {
    match schema {
        Schema { found: Some(found), known } if found > known => Err(OpenError::NewerSchema { found, known }),
        _ => Ok(()),
    }
}

/// The reason why a server cannot use this database address, if there is one.
pub fn refusal(url: &str) -> Option<String> {
    let scheme = url.split(':').next().unwrap_or_default();
    match scheme {
        "sqlite" if url.contains(":memory:") || url.contains("mode=memory") => {
            Some("is in memory, where nothing survives a restart: write sqlite://FILE".to_owned())
        }
        "sqlite" if !file(url).as_os_str().is_empty() => None,
        "postgres" | "postgresql" | "mysql" | "mariadb" => {
            Some(format!("names {scheme}, which is not built into this version yet: write sqlite://FILE"))
        }
        _ => {
            Some("is not the address of a database: write sqlite://FILE, for example sqlite://posthaste.db".to_owned())
        }
    }
}

/// The file of the database; empty for an address that [`refusal`] refuses.
fn file(url: &str) -> PathBuf {
    sqlite::file_of(url).unwrap_or_default()
}
