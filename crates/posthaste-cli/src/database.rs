//! The database of a configuration: the only place in the server that names one.
//!
//! Everything else uses [`HubDatabase`]. A second database is a second arm in each function here.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use posthaste_core::hub_store::{HubDatabase, OpenError, Schema};
use posthaste_sql::sqlite;

/// Opens the database for a server. Fails if another server has it for itself.
pub async fn open(url: &str) -> Result<Arc<dyn HubDatabase>, OpenError> {
    Ok(Arc::new(sqlite::HubDatabase::open(url).await?))
}

/// Opens a database that exists, to look at it while a server may use it; `None` if there is none yet.
pub async fn open_existing(url: &str) -> Result<Option<Arc<dyn HubDatabase>>, OpenError> {
    match file(url).exists() {
        true => Ok(Some(Arc::new(sqlite::HubDatabase::open_shared(url).await?))),
        false => Ok(None),
    }
}

/// What an operator calls the database.
pub fn name(url: &str) -> String {
    file(url).display().to_string()
}

/// The key file that belongs to the database, if the configuration names none.
pub fn default_key_file(url: &str) -> PathBuf {
    sqlite::HubDatabase::key_file(&file(url))
}

/// The file whose lock shows that a server has the database for itself, if one does.
pub fn lock_of_running_server(url: &str) -> Option<PathBuf> {
    let file = file(url);
    sqlite::HubDatabase::is_in_use(&file).unwrap_or(false).then(|| sqlite::HubDatabase::lock_file(&file))
}

/// Checks that a database could be made where there is none yet.
pub fn check_place(url: &str) -> Result<(), OpenError> {
    let file = file(url);
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match tempfile::tempfile_in(folder) {
        Ok(_) => Ok(()),
        Err(source) => Err(sqlite::HubDatabase::unwritable(&file, source)),
    }
}

/// Refuses a schema that a newer program made.
pub fn check_schema(schema: Schema) -> Result<(), OpenError> {
    match schema {
        Schema { found: Some(found), known } if found > known => Err(OpenError::NewerSchema { found, known }),
        _ => Ok(()),
    }
}

/// Why a server cannot use this address of a database.
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

/// Empty for an address that [`refusal`] refuses.
fn file(url: &str) -> PathBuf {
    sqlite::file_of(url).unwrap_or_default()
}
