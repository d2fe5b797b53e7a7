use anyhow::Context;
use posthaste_hub::Roles;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::Config;
use crate::database;
use crate::embedded::EmbeddedServer;
use crate::exit::Exit;
use crate::output::say;
use crate::telemetry;

/// Runs the server until a signal stops it.
pub async fn run(config: &Config, roles: Roles) -> anyhow::Result<()> {
    telemetry::start_logging(&config.telemetry.log)?;
    let mut signals = StopSignals::listen()?;
    let mut server = EmbeddedServer::start(config, roles.clone()).await?;
    let url = server.url();
    say(format_args!("  API       {url}/api"));
    say(format_args!("  Health    {url}/readyz"));
    say(format_args!("  Metrics   {url}/metrics"));
    if roles != Roles::default() {
        say(format_args!("  Roles     {roles}"));
    }
    say(format_args!("  Database  {}", database::name(&config.database.url)));
    let ended = tokio::select! {
        () = signals.next() => Ok(()),
        ended = server.ended() => ended.and_then(|()| Err(std::io::Error::other("it stopped without a signal"))),
    };
    say("stopping: finishing the work in flight; a second signal exits immediately");
    tokio::select! {
        stopped = server.stop() => ended.and(stopped).context("the server failed"),
        () = signals.next() => {
            say("stopped with work in flight; the next start continues it");
            std::process::exit(Exit::Failed as i32)
        }
    }
}

/// The signals that stop a process: SIGTERM from a supervisor, SIGINT from the terminal.
pub struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    /// Starts to listen. From now on, these signals no longer end the process themselves.
    pub fn listen() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("signals cannot be received");
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
