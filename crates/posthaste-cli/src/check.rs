use std::io;
use std::net::TcpListener;
use std::path::Path;

use posthaste_core::hub_store::{Fit, OpenError, Schema};
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
use crate::sources;

#[derive(clap::Args)]
pub struct CheckFlags {
    #[command(flatten)]
    server: ServerFlags,
}

/// The error of a check that found problems. The problems themselves are printed before.
#[derive(Debug, thiserror::Error)]
#[error("{wrong} of {total} checks failed")]
pub struct ChecksFailed {
    wrong: usize,
    total: usize,
    pub exit: Exit,
}

/// The result of one check.
#[derive(Serialize)]
struct Finding {
    part: String,
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
    let mut findings = vec![
        finding("configuration", Ok(file.unwrap_or_else(|| "defaults and environment; no file".to_owned()))),
        finding("database", schema(&config).await),
        finding("bus", bus::check(&config).await),
        finding("registry", registry::check(&config.registry).await),
        finding("server", server(&config, lock.as_deref())),
        finding("key file", key_file(&config).await),
        finding("address", address(&config, lock.is_some())),
    ];
    match sources::parts(&config) {
        Ok(parts) => {
            for part in &parts {
                let found = sources::check_one(&config, part).await;
                findings.push(source_finding(&part.settings.name, found));
            }
        }
        Err(error) => findings.push(finding("sources", Err(error))),
    }
    shared.output.print(&findings, |findings| {
        let mut table = Table::new(["", "CHECK", "FOUND"]);
        for Finding { part, ok, found, .. } in findings {
            table.row([if *ok { "ok" } else { "wrong" }.to_owned(), part.clone(), found.clone()]);
        }
        table
    })?;
    let wrong: Vec<Exit> = findings.iter().filter_map(|finding| finding.exit).collect();
    match wrong.first() {
        None => Ok(()),
        Some(exit) => Err(ChecksFailed { wrong: wrong.len(), total: findings.len(), exit: *exit }.into()),
    }
}

/// A source that cannot be read stops no other, and the server starts.
fn source_finding(name: &str, found: Result<String, String>) -> Finding {
    let (ok, exit) = (found.is_ok(), found.is_err().then_some(Exit::Unreachable));
    Finding { part: format!("source {name}"), ok, found: found.unwrap_or_else(|error| error), exit }
}

fn finding(part: &str, found: Result<String, StartError>) -> Finding {
    let part = part.to_owned();
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
    let Some(database) = database::open_existing(&config.database).await? else {
        database::check_place(url)?;
        return Ok(format!("{name} does not exist yet; `posthaste serve` creates it"));
    };
    let schema = database.migrations().schema().await.map_err(posthaste_hub::StartError::Store);
    database.close().await;
    let Schema { found, known, fit } = schema?;
    Ok(match (fit, found) {
        (Fit::TooNew, found) => return Err(OpenError::NewerSchema { found: found.unwrap_or(0), known }.into()),
        (Fit::Behind, None) => {
            format!("{name} has no schema yet; `posthaste serve` or `posthaste migrate up` creates it")
        }
        (Fit::Behind, Some(found)) => {
            format!("{name} has schema {found}; `posthaste serve` or `posthaste migrate up` migrates it to {known}")
        }
        (Fit::Works, Some(found)) if found > known => {
            format!("{name} has schema {found}, newer than {known} and compatible with it")
        }
        (Fit::Works, _) => format!("{name} has schema {known}, the newest"),
    })
}

fn server(config: &Config, lock: Option<&Path>) -> Result<String, StartError> {
    Ok(match lock {
        None if database::is_shared(&config.database.url) => "any number may run on this database".to_owned(),
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
    if database::is_shared(&config.database.url) {
        return Err(SecretError::Unshared(path).into());
    }
    Ok(format!("{} does not exist yet; `posthaste serve` creates it", path.display()))
}

async fn has_sealed_credentials(config: &Config) -> Result<bool, StartError> {
    let Some(database) = database::open_existing(&config.database).await? else { return Ok(false) };
    let found = async {
        // The query works only on a schema that this version works with.
        let works = database.migrations().schema().await?.fit == Fit::Works;
        Ok(works && database.registry().has_sealed_credentials().await?)
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
