//! The sources of a configuration: outbox tables in the databases of services.

use std::collections::HashMap;

use clap::Subcommand;
use posthaste_api::{SourceList, SourceMode, SourceOut, SourceState};
use posthaste_core::outbox::{Mode, TableName};
use posthaste_hub::{SourcePart, SourceSettings};
use posthaste_sql::sources::SourceTable;
use serde::Serialize;

use crate::args::Shared;
use crate::config::Config;
use crate::database;
use crate::embedded::StartError;
use crate::exit::{NotFound, UsageError};
use crate::output::{self, Table, say};
use crate::secret_text;

#[derive(Subcommand)]
pub enum SourcesCommand {
    /// List the sources of the server: whether it can read them, and how many events wait
    List,
    /// Connect to each source of the configuration, and say what is wrong and how to fix it
    Check {
        /// Only this source
        name: Option<String>,
    },
    /// Create the outbox table of a source, or bring it up to date
    Migrate {
        /// Only this source
        name: Option<String>,
        /// Connect as another user, who may create tables: the URL to use instead of the one in the configuration
        #[arg(long, requires = "name")]
        url: Option<String>,
        /// Print the SQL, and change nothing
        #[arg(long)]
        print: bool,
    },
}

pub async fn run(command: SourcesCommand, shared: &Shared) -> anyhow::Result<()> {
    match command {
        SourcesCommand::List => shared.output.print(&shared.client()?.sources().await?, list),
        SourcesCommand::Check { name } => check(shared, name.as_deref()).await,
        SourcesCommand::Migrate { name, url, print } => {
            let config = shared.layers()?.config()?;
            for source in selected(&config, name.as_deref())? {
                let source = SourceSettings { url: url.clone().unwrap_or(source.url.clone()), ..source.clone() };
                let table = open(&source).map_err(UsageError)?;
                match print {
                    true => table.migrations().iter().try_for_each(|migration| output::print(&migration.up))?,
                    false => migrate(&source.name, &table).await?,
                }
            }
            Ok(())
        }
    }
}

/// The sources for a hub. Fails if one has a wrong URL, or if two are the same table.
pub fn parts(config: &Config) -> Result<Vec<SourcePart>, StartError> {
    let (mut parts, mut wrong, mut tables) = (Vec::new(), Vec::new(), HashMap::new());
    tables.insert(
        table_key(&database::place(&config.database.url), "", &TableName::default()),
        "the server itself".to_owned(),
    );
    for settings in &config.sources {
        match open(settings) {
            Ok(table) => {
                let database_name = table.database_name();
                let reader = format!("source {:?}", settings.name);
                let key = table_key(&database_name, table.connection_settings(), table.table());
                if let Some(other) = tables.insert(key, reader) {
                    wrong.push(format!(
                        "source {:?} reads table {} in {database_name}, which {other} reads: remove one of them, or set \
                         its table",
                        settings.name,
                        table.table(),
                    ));
                }
                parts.push(SourcePart { settings: settings.clone(), database: table.database(), database_name });
            }
            Err(error) => wrong.push(error),
        }
    }
    match wrong.is_empty() {
        true => Ok(parts),
        false => Err(StartError::Sources(wrong)),
    }
}

/// Identifies a table: databases do not distinguish upper and lower case in the names of tables, or not everywhere.
fn table_key(database: &str, connection_settings: &str, table: &TableName) -> (String, String, String) {
    (database.to_owned(), connection_settings.to_owned(), table.to_lowercase().to_string())
}

/// The table of a source. An error is a sentence with the name of the source, and without its password.
fn open(source: &SourceSettings) -> Result<SourceTable, String> {
    let name = &source.name;
    let url = secret_text::resolve(&format!("the url of source {name:?}"), &source.url)?;
    let mode = match source.mode {
        SourceMode::MultiNode => Mode::MultiNode,
        SourceMode::Ordered => Mode::ORDERED,
    };
    SourceTable::new(&url, source.table.clone(), mode)
        .map_err(|error| format!("source {name:?} has a wrong url: {error}"))
}

/// The sources of the configuration, or the one with this name.
fn selected<'a>(config: &'a Config, name: Option<&str>) -> anyhow::Result<Vec<&'a SourceSettings>> {
    let found: Vec<&SourceSettings> =
        config.sources.iter().filter(|source| name.is_none_or(|name| source.name == name)).collect();
    match (found.is_empty(), name) {
        (true, Some(name)) => Err(NotFound(format!("the configuration has no source {name:?}")).into()),
        (true, None) => Err(UsageError("the configuration has no [[sources]]".to_owned()).into()),
        _ => Ok(found),
    }
}

async fn migrate(name: &str, table: &SourceTable) -> anyhow::Result<()> {
    let database = table.database();
    let migrated = database.migrate().await;
    database.close().await;
    migrated.map_err(|error| anyhow::Error::new(error).context(format!("source {name:?}")))?;
    say(format_args!("source {name:?}: table {} in {} is up to date", table.table(), table.database_name()));
    Ok(())
}

/// The result of one check.
#[derive(Serialize)]
struct Checked {
    name: String,
    ok: bool,
    found: String,
}

/// Some sources cannot be read. They are printed before.
#[derive(Debug, thiserror::Error)]
#[error("{wrong} of {total} sources cannot be read")]
pub struct SourcesUnreadable {
    wrong: usize,
    total: usize,
}

async fn check(shared: &Shared, name: Option<&str>) -> anyhow::Result<()> {
    let config = shared.layers()?.config()?;
    let parts = parts(&config)?;
    let mut checked = Vec::new();
    for source in selected(&config, name)? {
        let Some(part) = parts.iter().find(|part| part.settings.name == source.name) else { continue };
        let (ok, found) = match check_one(&config, part).await {
            Ok(found) => (true, found),
            Err(error) => (false, error),
        };
        checked.push(Checked { name: source.name.clone(), ok, found });
    }
    shared.output.print(&checked, |checked| {
        let mut table = Table::new(["", "SOURCE", "FOUND"]);
        for Checked { name, ok, found } in checked {
            table.row([if *ok { "ok" } else { "wrong" }.to_owned(), name.clone(), found.clone()]);
        }
        table
    })?;
    let wrong = checked.iter().filter(|checked| !checked.ok).count();
    match wrong {
        0 => Ok(()),
        wrong => Err(SourcesUnreadable { wrong, total: checked.len() }.into()),
    }
}

/// Looks whether a server could read the source, and changes no row. What it finds, or what is wrong.
pub async fn check_one(config: &Config, part: &SourcePart) -> Result<String, String> {
    if !part.settings.enabled {
        return Ok("disabled: the server does not read it".to_owned());
    }
    let checked = async {
        let pending = part.database.count_pending(config.outbox.lease, PENDING_LIMIT).await;
        let pending = pending.map_err(|error| posthaste_hub::source_error(&error))?;
        let more = if pending as usize >= PENDING_LIMIT { " or more" } else { "" };
        Ok(format!("{} table {}: {pending}{more} events wait", part.database_name, part.settings.table))
    };
    let checked = checked.await;
    part.database.close().await;
    checked
}

const PENDING_LIMIT: usize = 10_000;

fn list(sources: &SourceList) -> Table {
    let mut table = Table::new(["SOURCE", "STATUS", "PENDING", "LAG", "DATABASE", "TABLE", "MODE", "ERROR"]);
    for source in &sources.items {
        let SourceOut { name, database, table: outbox, mode, status, pending, lag_seconds, last_error } =
            source.clone();
        table.row([
            name,
            match status {
                SourceState::Up => "up",
                SourceState::Down => "down",
                SourceState::Paused => "paused",
            }
            .to_owned(),
            pending.map_or("-".to_owned(), |pending| pending.to_string()),
            lag_seconds.map_or("-".to_owned(), |lag| format!("{lag:.1}s")),
            database,
            outbox,
            match mode {
                SourceMode::MultiNode => "multi-node",
                SourceMode::Ordered => "ordered",
            }
            .to_owned(),
            last_error.unwrap_or_default(),
        ]);
    }
    table
}
