use clap::Subcommand;
use posthaste_hub::Sealer;

use crate::output;

#[derive(Subcommand)]
pub enum SecretsCommand {
    /// Print a new key for a key file, which all servers on one database share
    Generate,
}

pub fn run(command: &SecretsCommand) -> anyhow::Result<()> {
    match command {
        SecretsCommand::Generate => output::print(format!("{}\n", Sealer::new_key()?)),
    }
}
