use std::io;
use std::net::TcpListener;
use std::path::Path;

use posthaste_core::hub_store::Schema;
use posthaste_hub::{Sealer, SecretError};
use serde::Serialize;

use crate::args::{ServerFlags, Shared};
use crate::bus;
use crate::config::Config;
use crate::database;
use crate::embedded::StartError;
use crate::exit::Exit;
use crate::output::Table;
use crate::registry;

#[derive(clap::Args)]
pub struct CheckFlags {
    #[command(flatten)]
    server: ServerFlags,
}

/// The error of a check that found problems. The problems themselves are printed before.
#[derive(Debug, thiserror::Error)]
#[error("{wrong} of {total} checks failed: `posthaste serve` would not start")]
pub struct ChecksFailed {
    wrong: usize,
    total: usize,
    pub exit: Exit,
}

/// The result of one check.
#[derive(Serialize)]
struct Finding {
    part: &'static str,
    ok: bool,
    found: String,
    #[serde(skip)]
    exit: Option<Exit>,
}

/// Checks everything that a server with this configuration needs, and changes nothing.
pub async fn run(shared: &Shared, flags: &CheckFlags) -> anyhow::Result<()> {
    let mut layers = shared.layers()?;
    flags.server.add_to(&mut layers);
    let file = layers.file().map(|path| path.display().to_string());
    let config = layers.config()?;

    let lock = database::lock_of_running_server(&config.database.url);
    let findings = vec![
        finding("configuration", Ok(file.unwrap_or_else(|| "defaults and environment; no file".to_owned()))),
        finding("database", schema(&config).await),
        finding("bus", bus::check(&config).await),
        finding("registry", registry::check(&config.registry).await),
        finding("server", server(lock.as_deref())),
        finding("key file", key_file(&config).await),
        finding("address", address(&config, lock.is_some())),
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
        Some(exit) => Err(ChecksFailed { wrong: wrong.len(), total: findings.len(), exit: *exit }.into()),
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

async fn schema(config: &Config) -> Result<String, StartError> {
    let url = &config.database.url;
    let name = database::name(url);
    let Some(database) = database::open_existing(url).await? else {
        database::check_place(url)?;
        return Ok(format!("{name} does not exist yet; `posthaste serve` creates it"));
    };
    let schema = database.schema().await.map_err(posthaste_hub::StartError::Store);
    database.close().await;
    let schema = schema?;
    database::check_schema(schema)?;
    let Schema { found, known } = schema;
    Ok(match found {
        Some(found) if found < known => format!("{name} has schema {found}; `posthaste serve` migrates it to {known}"),
        Some(found) => format!("{name} has schema {found}, the newest"),
        None => format!("{name} has no schema yet; `posthaste serve` creates it"),
    })
}

fn server(lock: Option<&Path>) -> Result<String, StartError> {
    Ok(match lock {
        Some(lock) => format!("one is running on this database (lock file {})", lock.display()),
        None => "none is running on this database".to_owned(),
    })
}

async fn key_file(config: &Config) -> Result<String, StartError> {
    let path = config.key_file();
    if path.exists() {
        Sealer::read(&path)?;
        return Ok(format!("{} contains a key", path.display()));
    }
    if has_sealed_credentials(config).await? {
        return Err(SecretError::Missing(path).into());
    }
    Ok(format!("{} does not exist yet; `posthaste serve` creates it", path.display()))
}

async fn has_sealed_credentials(config: &Config) -> Result<bool, StartError> {
    let Some(database) = database::open_existing(&config.database.url).await? else { return Ok(false) };
    let found = async {
        let Schema { found, known } = database.schema().await?;
        // The query works only on the schema of this version.
        Ok(found == Some(known) && database.registry().has_sealed_credentials().await?)
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
