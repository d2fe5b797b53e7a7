use std::io;
use std::net::TcpListener;
use std::path::Path;

use posthaste_hub::{Sealer, SecretError};
use posthaste_sql::sqlite::{Database, OpenError, Registry, Schema};
use serde::Serialize;

use crate::args::{ServerFlags, Shared};
use crate::config::Config;
use crate::embedded::{DatabaseLock, StartError};
use crate::exit::Exit;
use crate::output::Table;

#[derive(clap::Args)]
pub struct CheckFlags {
    #[command(flatten)]
    server: ServerFlags,
}

/// What was found is printed; this is how the command ends.
#[derive(Debug, thiserror::Error)]
#[error("{wrong} of {looked_at} checks failed: `posthaste serve` would not start")]
pub struct ChecksFailed {
    wrong: usize,
    looked_at: usize,
    pub exit: Exit,
}

/// What was looked at, and what was found there.
#[derive(Serialize)]
struct Finding {
    part: &'static str,
    ok: bool,
    found: String,
    #[serde(skip)]
    exit: Option<Exit>,
}

/// Looks at everything that a server of this configuration needs, and changes none of it.
pub async fn run(shared: &Shared, flags: &CheckFlags) -> anyhow::Result<()> {
    let mut layers = shared.layers()?;
    flags.server.add_to(&mut layers);
    let file = layers.file().map(|path| path.display().to_string());
    let config = layers.config()?;

    let is_running = DatabaseLock::is_taken(&config).unwrap_or(false);
    let findings = vec![
        finding("configuration", Ok(file.unwrap_or_else(|| "defaults and environment; no file".to_owned()))),
        finding("database", database(&config).await),
        finding("server", server(&config, is_running)),
        finding("key file", key_file(&config).await),
        finding("address", address(&config, is_running)),
    ];
    shared.output.print(&findings, |findings| {
        let mut table = Table::new(["", "CHECK", "FOUND"]);
        for Finding { part, ok, found, .. } in findings {
            table.row([if *ok { "ok" } else { "wrong" }.to_owned(), (*part).to_owned(), found.clone()]);
        }
        table
    })?;
    let wrong: Vec<Exit> = findings.iter().filter_map(|finding| finding.exit).collect();
    match wrong.first() {
        None => Ok(()),
        Some(exit) => Err(ChecksFailed { wrong: wrong.len(), looked_at: findings.len(), exit: *exit }.into()),
    }
}

fn finding(part: &'static str, found: Result<String, StartError>) -> Finding {
    match found {
        Ok(found) => Finding { part, ok: true, found, exit: None },
        Err(error) => {
            let exit = Some(error.exit());
            Finding { part, ok: false, found: format!("{:#}", anyhow::Error::new(error)), exit }
        }
    }
}

async fn database(config: &Config) -> Result<String, StartError> {
    let path = config.database_file();
    if path.exists() {
        let database = Database::open(&config.database.url).await?;
        let schema = database.schema().await.map_err(posthaste_hub::StartError::Store);
        database.close().await;
        let Schema { found, known } = schema?;
        return match found {
            Some(found) if found > known => Err(OpenError::NewerSchema { found, known }.into()),
            Some(found) if found < known => {
                Ok(format!("{} has schema {found}; `posthaste serve` brings it to {known}", path.display()))
            }
            Some(found) => Ok(format!("{} has schema {found}, the newest", path.display())),
            None => Ok(format!("{} has no schema yet; `posthaste serve` makes it", path.display())),
        };
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match tempfile::tempfile_in(folder) {
        Ok(_) => Ok(format!("{} is not there yet; `posthaste serve` makes it", path.display())),
        Err(source) => Err(StartError::Unwritable { path, source }),
    }
}

fn server(config: &Config, is_running: bool) -> Result<String, StartError> {
    Ok(match is_running {
        true => format!("one is running on this database (it holds {})", config.lock_file().display()),
        false => "none is running on this database".to_owned(),
    })
}

async fn key_file(config: &Config) -> Result<String, StartError> {
    let path = config.key_file();
    if path.exists() {
        Sealer::read(&path)?;
        return Ok(format!("{} holds a key", path.display()));
    }
    if has_sealed_credentials(config).await? {
        return Err(SecretError::Missing(path).into());
    }
    Ok(format!("{} is not there yet; `posthaste serve` makes it", path.display()))
}

async fn has_sealed_credentials(config: &Config) -> Result<bool, StartError> {
    if !config.database_file().exists() {
        return Ok(false);
    }
    let database = Database::open(&config.database.url).await?;
    let found = async {
        let Schema { found, known } = database.schema().await?;
        // Only a database with the schema of this program can be asked.
        Ok(found == Some(known) && Registry::new(database.clone()).has_sealed_credentials().await?)
    };
    let found = found.await.map_err(posthaste_hub::StartError::Store);
    database.close().await;
    Ok(found?)
}

fn address(config: &Config, is_running: bool) -> Result<String, StartError> {
    let address = config.http.listen;
    match TcpListener::bind(address) {
        Ok(_) => Ok(format!("{address} is free")),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_running => {
            Ok(format!("{address} is in use, as it should be while the server runs"))
        }
        Err(source) if source.kind() == io::ErrorKind::AddrInUse => Err(StartError::AddressInUse { address, source }),
        Err(source) => Err(StartError::Listen { address, source }),
    }
}
