//! The binary `posthaste`: the server, and the commands that call its API.
//!
//! The other crates do the work; this one contains the configuration, the wiring and the messages. Commands write data
//! to stdout and everything else to stderr, so that they work in a pipe.

mod args;
mod bench;
mod bus;
mod channels;
mod check;
mod client;
mod config;
mod database;
mod definitions;
mod demo;
mod dlt;
mod embedded;
mod exit;
mod migrate;
mod output;
mod publish;
mod quarantine;
mod registry;
mod secret_text;
mod secrets;
mod serve;
mod sources;
mod subscriptions;
mod tail;
mod telemetry;
mod topics;

use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser};

use args::{Args, Command};
use exit::exit_of;

fn main() -> ExitCode {
    let args = Args::parse();
    let result = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("the async runtime cannot start")
        .and_then(|runtime| {
            let result = runtime.block_on(run(args));
            // A thread that still reads stdin must not delay the exit.
            runtime.shutdown_background();
            result
        });
    let Err(error) = result else { return ExitCode::SUCCESS };
    match exit_of(&error) {
        None => ExitCode::SUCCESS,
        Some(exit) => {
            output::say(format_args!("error: {error:#}"));
            ExitCode::from(exit as u8)
        }
    }
}

async fn run(args: Args) -> anyhow::Result<()> {
    let shared = &args.shared;
    match args.command {
        Command::Serve(flags) => serve::run(&shared.server_config(&flags.server)?, flags.roles()).await,
        Command::Demo(options) => demo::run(&options).await,
        Command::Migrate(options) => migrate::run(options, shared).await,
        Command::Check(flags) => check::run(shared, &flags).await,
        Command::Bench(options) => bench::run(options).await,
        Command::Secrets(command) => secrets::run(&command),
        Command::Config => output::print(config::DEFAULT_CONFIG),
        Command::Publish(options) => publish::run(*options, &shared.client()?, shared.output).await,
        Command::Definitions(command) => definitions::run(command, &shared.client()?, shared.output).await,
        Command::Subscriptions(command) => subscriptions::run(command, &shared.client()?, shared.output).await,
        Command::Dlt(command) => dlt::run(command, &shared.client()?, shared.output).await,
        Command::Quarantine(command) => quarantine::run(command, &shared.client()?, shared.output).await,
        Command::Channels(command) => channels::run(command, &shared.client()?, shared.output).await,
        Command::Sources(command) => sources::run(command, shared).await,
        Command::Topics(command) => topics::run(command, &shared.client()?, shared.output).await,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "posthaste", &mut script);
            output::print(String::from_utf8_lossy(&script))
        }
    }
}
