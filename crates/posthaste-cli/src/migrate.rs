use std::sync::Arc;

use chrono::{DateTime, Utc};
use clap::Subcommand;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{Fit, HubDatabase, Migration, MigrationState, OpenError, Schema, TableRows};
use posthaste_sql::MigrationText;
use serde::Serialize;

use crate::args::{DatabaseFlag, Shared};
use crate::config::Config;
use crate::database;
use crate::embedded::StartError;
use crate::exit::UsageError;
use crate::output::{Output, Table, moment, print, say};
use crate::telemetry;

#[derive(clap::Args)]
pub struct MigrateOptions {
    #[command(flatten)]
    database: DatabaseFlag,
    #[command(subcommand)]
    command: MigrateCommand,
}

/// A schema has the number of its newest migration. Schema 0 is an empty database.
#[derive(Subcommand)]
enum MigrateCommand {
    /// Apply the pending migrations. Servers of the previous release may run meanwhile
    Up {
        /// Apply those up to this schema only [default: all]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
        to: Option<i64>,
    },
    /// Revert migrations, newest first, which deletes their tables. Stop all servers before
    Down {
        /// The schema to go back to; 0 deletes everything
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(0..))]
        to: i64,
        /// Delete, and do not only say what would be deleted
        #[arg(long)]
        yes: bool,
    },
    /// List the migrations: which of them are applied, and when
    List,
    /// Print the SQL of migrations, for psql or sqlite3. It needs no database
    Print {
        /// The schema that the database has [default: 0, with --down the newest]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(0..))]
        from: Option<i64>,
        /// The schema that the database gets [default: the newest, with --down 0]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(0..))]
        to: Option<i64>,
        /// Print the SQL that reverts them
        #[arg(long)]
        down: bool,
    },
    /// Compare the schema with the one that this program needs, table by table
    Validate,
}

pub async fn run(options: MigrateOptions, shared: &Shared) -> anyhow::Result<()> {
    let mut layers = shared.layers()?;
    options.database.add_to(&mut layers);
    let config = layers.config_of_section("database")?;
    telemetry::start_logging(&config.telemetry.log)?;
    let output = shared.output;
    match options.command {
        MigrateCommand::Up { to } => up(&config, to, output).await,
        MigrateCommand::Down { to, yes } => down(&config, to, yes, output).await,
        MigrateCommand::List => output.print(&listed(&existing(&config).await?, &config).await?, |items| table(items)),
        MigrateCommand::Print { from, to, down } => print_sql(&config, from, to, down),
        MigrateCommand::Validate => validate(&config, output).await,
    }
}

/// A migration, as the commands show it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Item {
    number: i64,
    name: String,
    status: Status,
    applied_at: Option<DateTime<Utc>>,
}

#[derive(Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
enum Status {
    Pending,
    Applied,
    /// Applied by a newer program; this one does not know it.
    Newer,
}

impl From<Migration> for Item {
    fn from(Migration { number, name, state, is_known }: Migration) -> Self {
        let (status, applied_at) = match state {
            MigrationState::Pending => (Status::Pending, None),
            MigrationState::Applied(at) if is_known => (Status::Applied, at),
            MigrationState::Applied(at) => (Status::Newer, at),
        };
        Self { number, name, status, applied_at }
    }
}

fn table(items: &[Item]) -> Table {
    let mut table = Table::new(["SCHEMA", "NAME", "STATUS", "APPLIED"]);
    for Item { number, name, status, applied_at } in items {
        let status = match status {
            Status::Pending => "PENDING",
            Status::Applied => "APPLIED",
            Status::Newer => "NEWER",
        };
        table.row([number.to_string(), name.clone(), status.to_owned(), applied_at.map(moment).unwrap_or_default()]);
    }
    table
}

async fn up(config: &Config, to: Option<i64>, output: Output) -> anyhow::Result<()> {
    let newest = newest(config);
    let to = within(to.unwrap_or(newest), "--to", newest)?;
    let database = database::open(&config.database).await.map_err(StartError::Database)?;
    let result = apply(&*database, to).await;
    database.close().await;
    let (applied, Schema { found, known, .. }) = result?;
    output.print(&applied, |applied| table(applied))?;
    let name = database::name(&config.database.url);
    match found.unwrap_or(0) {
        found if found > known => {
            say(format_args!("database {name} has schema {found}, newer than {known}: nothing to do"));
        }
        found => say(format_args!("database {name} has schema {found}")),
    }
    Ok(())
}

/// Returns the migrations that were applied, and the schema afterwards.
async fn apply(database: &dyn HubDatabase, to: i64) -> anyhow::Result<(Vec<Item>, Schema)> {
    let mut before = items(database).await?;
    before.retain(|item| item.status == Status::Pending);
    database.migrations().up(to).await.map_err(StartError::Database)?;
    let mut applied = items(database).await?;
    let was_pending = |item: &Item| before.iter().any(|pending| pending.number == item.number);
    applied.retain(|item| item.status == Status::Applied && was_pending(item));
    Ok((applied, schema(database).await?))
}

async fn down(config: &Config, to: i64, yes: bool, output: Output) -> anyhow::Result<()> {
    within(to, "--to", newest(config))?;
    let name = database::name(&config.database.url);
    match existing(config).await? {
        Some(database) => database.close().await,
        None => anyhow::bail!("database {name} does not exist: there is nothing to revert"),
    }
    // An exclusive database can be opened only if no server uses it.
    let database = database::open(&config.database).await.map_err(StartError::Database)?;
    let result = revert(&*database, &name, to, yes, output).await;
    database.close().await;
    result
}

async fn revert(database: &dyn HubDatabase, name: &str, to: i64, yes: bool, output: Output) -> anyhow::Result<()> {
    let found = schema(database).await?.found.unwrap_or(0);
    if found <= to {
        say(format_args!("database {name} has schema {found}: there is nothing to revert"));
        return Ok(());
    }
    let deleted = database.migrations().tables_above(to).await.map_err(unreadable)?;
    let deleted: Vec<DeletedTable> = deleted.into_iter().map(DeletedTable::from).collect();
    output.print(&deleted, |deleted| {
        let mut table = Table::new(["TABLE", "ROWS"]);
        deleted.iter().for_each(|DeletedTable { table: name, rows }| table.row([name.clone(), rows.to_string()]));
        table
    })?;
    if !yes {
        let what = format!("going back to schema {to} of database {name} deletes these tables with all their rows");
        return Err(UsageError(format!("{what}: nothing was changed; add --yes to do it")).into());
    }
    database.migrations().down(to).await.map_err(StartError::Database)?;
    say(format_args!("database {name} has schema {to}; the tables above are deleted"));
    Ok(())
}

/// A table that `down` deletes.
#[derive(Serialize)]
struct DeletedTable {
    table: String,
    rows: i64,
}

impl From<TableRows> for DeletedTable {
    fn from(TableRows { table, rows }: TableRows) -> Self {
        Self { table, rows }
    }
}

fn print_sql(config: &Config, from: Option<i64>, to: Option<i64>, down: bool) -> anyhow::Result<()> {
    let newest = newest(config);
    let (first, last) = if down { (newest, 0) } else { (0, newest) };
    let from = within(from.unwrap_or(first), "--from", newest)?;
    let to = within(to.unwrap_or(last), "--to", newest)?;
    let (lower, upper) = if down { (to, from) } else { (from, to) };
    if lower > upper {
        let rule = if down { "With --down, --from must not be below --to" } else { "--from must not be above --to" };
        return Err(UsageError(format!("{rule}: --from {from} --to {to} prints nothing")).into());
    }
    let mut texts = database::migrations(&config.database.url);
    texts.retain(|text| (lower + 1..=upper).contains(&number(text)));
    if down {
        texts.reverse();
    }
    let (head, begin) = database::script(&config.database.url);
    let mut sql = format!("-- Migrates a database of Posthaste from schema {from} to schema {to}.\n{head}");
    for text in texts {
        let (begin, commit) = if text.is_transactional() { (begin, "COMMIT;\n") } else { ("", "") };
        let statements = if down { text.down } else { text.up };
        sql += &format!("\n-- {}\n{begin}\n{statements}{commit}", text.name);
    }
    print(sql)
}

/// The result of a validation.
#[derive(Serialize)]
struct Validation {
    schema: i64,
    expected: i64,
    problems: Vec<String>,
}

async fn validate(config: &Config, output: Output) -> anyhow::Result<()> {
    let name = database::name(&config.database.url);
    let Some(database) = existing(config).await? else {
        anyhow::bail!("database {name} does not exist: `posthaste migrate up` creates it");
    };
    let result = compare(&*database).await;
    database.close().await;
    let (Schema { found, known, fit }, problems) = result?;
    let validation = Validation { schema: found.unwrap_or(0), expected: known, problems };
    output.print(&validation, |validation| {
        let mut table = Table::new(["PROBLEM"]);
        validation.problems.iter().for_each(|problem| table.row([problem.clone()]));
        match validation.problems.is_empty() {
            true => Table::of_fields([
                ("schema", validation.schema.to_string()),
                ("expected", validation.expected.to_string()),
            ]),
            false => table,
        }
    })?;
    if validation.problems.is_empty() {
        return Ok(());
    }
    let remedy = match fit {
        Fit::Behind => "run `posthaste migrate up`",
        Fit::TooNew => "use a newer posthaste, or another database",
        Fit::Works => "create it again with the statements that `posthaste migrate print` shows, or restore a backup",
    };
    anyhow::bail!("database {name} does not have the schema that this program needs: {remedy}")
}

async fn compare(database: &dyn HubDatabase) -> anyhow::Result<(Schema, Vec<String>)> {
    let schema = schema(database).await?;
    let problems = match schema.fit {
        Fit::Behind => {
            let pending = items(database).await?.into_iter().filter(|item| item.status == Status::Pending);
            pending.map(|Item { number, name, .. }| format!("migration {number} ({name}) is pending")).collect()
        }
        Fit::TooNew => vec![format!("schema {} is too new for this program", schema.found.unwrap_or(0))],
        Fit::Works => database.migrations().missing().await.map_err(unreadable)?,
    };
    Ok((schema, problems))
}

/// The database, unless it is a file that does not exist.
async fn existing(config: &Config) -> anyhow::Result<Option<Arc<dyn HubDatabase>>> {
    Ok(database::open_existing(&config.database).await.map_err(StartError::Database)?)
}

async fn listed(database: &Option<Arc<dyn HubDatabase>>, config: &Config) -> anyhow::Result<Vec<Item>> {
    let Some(database) = database else {
        let item = |text: MigrationText| {
            let name = text.name.split_once('_').map_or(text.name, |(_, name)| name).to_owned();
            Item { number: number(&text), name, status: Status::Pending, applied_at: None }
        };
        return Ok(database::migrations(&config.database.url).into_iter().map(item).collect());
    };
    let items = items(&**database).await;
    database.close().await;
    items
}

async fn items(database: &dyn HubDatabase) -> anyhow::Result<Vec<Item>> {
    let list = database.migrations().list().await.map_err(unreadable)?;
    Ok(list.into_iter().map(Item::from).collect())
}

async fn schema(database: &dyn HubDatabase) -> anyhow::Result<Schema> {
    Ok(database.migrations().schema().await.map_err(unreadable)?)
}

fn unreadable(error: StoreError) -> StartError {
    StartError::Database(OpenError::Store(error))
}

fn newest(config: &Config) -> i64 {
    database::migrations(&config.database.url).iter().map(number).max().unwrap_or(0)
}

/// The number at the beginning of the name of a migration.
fn number(text: &MigrationText) -> i64 {
    text.name.split('_').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn within(schema: i64, flag: &str, newest: i64) -> Result<i64, UsageError> {
    match schema <= newest {
        true => Ok(schema),
        false => Err(UsageError(format!(
            "{flag} {schema} is a schema that this program does not know: {newest} is the newest"
        ))),
    }
}
