use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Parser, Subcommand};
use posthaste_hub::{Role, Roles};

use crate::bench::BenchOptions;
use crate::channels::ChannelsCommand;
use crate::check::CheckFlags;
use crate::client::Client;
use crate::config::{Config, ConfigError, Layers};
use crate::definitions::DefinitionsCommand;
use crate::demo::DemoOptions;
use crate::dlt::DltCommand;
use crate::exit::UsageError;
use crate::migrate::MigrateOptions;
use crate::output::Output;
use crate::publish::PublishOptions;
use crate::quarantine::QuarantineCommand;
use crate::secrets::SecretsCommand;
use crate::sources::SourcesCommand;
use crate::subscriptions::SubscriptionsCommand;
use crate::topics::TopicsCommand;

const GLOBAL: &str = "Global options";

/// Transactional outbox, event hub and webhook deliverer in one.
///
/// Exit codes: 0 ok, 1 failed, 2 usage or configuration error, 3 cannot reach the server or something it needs, 4 not
/// found.
#[derive(Parser)]
#[command(name = "posthaste", version, max_term_width = 100)]
pub struct Args {
    #[command(flatten)]
    pub shared: Shared,
    #[command(subcommand)]
    pub command: Command,
}

/// Options that every command accepts. The help shows them after the command's own options.
#[derive(clap::Args)]
pub struct Shared {
    /// Configuration file [default: ./posthaste.toml if it exists]
    #[arg(long, global = true, value_name = "FILE", help_heading = GLOBAL)]
    config: Option<PathBuf>,
    /// Server to talk to [default: client.server or http.listen of the configuration]
    #[arg(long, global = true, value_name = "URL", help_heading = GLOBAL)]
    server: Option<String>,
    /// How to print data: table or json
    #[arg(long, global = true, value_enum, default_value_t, hide_possible_values = true, help_heading = GLOBAL)]
    pub output: Output,
}

#[derive(Subcommand)]
pub enum Command {
    /// Run the server
    Serve(ServeFlags),
    /// Show the whole pipeline at work on a throwaway database, in one terminal
    Demo(DemoOptions),
    /// Publish events from flags, a JSON file or stdin
    Publish(Box<PublishOptions>),
    /// Event definitions: the kinds of events that subscribers can subscribe to
    #[command(subcommand)]
    Definitions(DefinitionsCommand),
    /// Subscriptions: which subscriber receives which events, at which address
    #[command(subcommand)]
    Subscriptions(SubscriptionsCommand),
    /// Dead letters: deliveries that failed too often
    #[command(subcommand)]
    Dlt(DltCommand),
    /// Quarantine: records that could not be read
    #[command(subcommand)]
    Quarantine(QuarantineCommand),
    /// Channels: the event types, and where their events are published
    #[command(subcommand)]
    Channels(ChannelsCommand),
    /// Sources: outbox tables in the databases of services
    #[command(subcommand)]
    Sources(SourcesCommand),
    /// Topics of the bus: their partitions, their records, and how far each group has read
    #[command(subcommand)]
    Topics(TopicsCommand),
    /// The database schema: bring it up to date, go back, print it as SQL, compare it
    Migrate(MigrateOptions),
    /// The key with which the credentials of subscriptions are sealed
    #[command(subcommand)]
    Secrets(SecretsCommand),
    /// Find problems in the configuration and the database, and say how to fix them
    Check(CheckFlags),
    /// Print the commented default configuration
    Config,
    /// Measure the throughput on this machine, compared with the simplest code that does the same
    Bench(BenchOptions),
    /// Print a completion script for a shell
    Completions { shell: clap_complete::Shell },
}

#[derive(clap::Args)]
pub struct ServeFlags {
    #[command(flatten)]
    pub server: ServerFlags,
    /// What this server does, of ingest, channels, processor, delivery, dlt and api [default: everything]
    #[arg(long, value_name = "ROLE,…", value_delimiter = ',')]
    roles: Vec<Role>,
}

impl ServeFlags {
    pub fn roles(&self) -> Roles {
        match self.roles.is_empty() {
            true => Roles::default(),
            false => Roles::of(self.roles.iter().copied()),
        }
    }
}

/// Flags for keys of the configuration that are often set by hand.
#[derive(clap::Args)]
pub struct ServerFlags {
    /// Address to listen on; with port 0, the system chooses a free port [http.listen]
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    #[command(flatten)]
    database: DatabaseFlag,
}

/// The flag that names the database.
#[derive(clap::Args)]
pub struct DatabaseFlag {
    /// Database to use, sqlite://FILE or postgres://USER@HOST/DATABASE [database.url]
    #[arg(long, global = true, value_name = "URL")]
    database: Option<String>,
}

impl Shared {
    pub fn layers(&self) -> Result<Layers, ConfigError> {
        Layers::of_process(self.config.as_deref())
    }

    pub fn server_config(&self, flags: &ServerFlags) -> Result<Config, ConfigError> {
        let mut layers = self.layers()?;
        flags.add_to(&mut layers);
        layers.config()
    }

    /// Finds the server: by --server, else by `client.server`, else at `http.listen` of the configuration.
    pub fn client(&self) -> anyhow::Result<Client> {
        if let Some(server) = &self.server {
            return Ok(Client::new(server)?);
        }
        let config = self.layers()?.config()?;
        if !config.client.server.is_empty() {
            return Ok(Client::new(&config.client.server)?);
        }
        let listen = config.http.listen;
        if listen.port() == 0 {
            let message = "http.listen has port 0: pass the address that `posthaste serve` printed as --server";
            return Err(UsageError(message.to_owned()).into());
        }
        Ok(Client::new(&format!("http://{listen}"))?)
    }
}

impl ServerFlags {
    pub fn add_to(&self, layers: &mut Layers) {
        if let Some(listen) = &self.listen {
            layers.add_flag("--listen", "http.listen", &listen.to_string());
        }
        self.database.add_to(layers);
    }
}

impl DatabaseFlag {
    pub fn add_to(&self, layers: &mut Layers) {
        if let Some(url) = &self.database {
            layers.add_flag("--database", "database.url", url);
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}
