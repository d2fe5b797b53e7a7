//! PostgreSQL.

use std::process::Command;

use tokio::sync::OnceCell;

use super::watched::{Server, create_database};

const SCRIPT: &str = concat!(include_str!("postgres.sh"), include_str!("watch.sh"));

/// The URL of a new, empty database on a throwaway PostgreSQL. One server for a test binary, one database for a call.
///
/// The server is fast and loses commits in a crash: a test that crashes its server starts a [`Postgres`] of its own.
pub async fn postgres() -> String {
    static SERVER: OnceCell<Server> = OnceCell::const_new();
    let fast = "-c synchronous_commit=off -c full_page_writes=off";
    database(SERVER.get_or_init(|| Server::start(SCRIPT, fast)).await).await
}

/// A PostgreSQL for one test, to crash and start again. It is removed when the process ends, or when dropped.
///
/// Commits survive a crash of the server, but not a crash of the machine: the server does not wait for the disk.
pub struct Postgres {
    server: Server,
    url: String,
}

impl Postgres {
    /// Starts a server that holds one empty database.
    pub async fn start() -> Self {
        Self::start_with("-c synchronous_commit=on").await
    }

    /// Starts a server with these settings on its command line, such as `-c fsync=on`.
    pub async fn start_with(settings: &'static str) -> Self {
        let server = Server::start(SCRIPT, settings).await;
        let url = database(&server).await;
        Self { server, url }
    }

    /// The URL of its database, the same through every restart.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Crashes the server (an immediate stop) and starts it again on the same port and data; returns when it accepts
    /// connections.
    pub async fn restart(&mut self) {
        self.stop().await;
        self.start_again().await;
    }

    /// Crashes the server (an immediate stop); returns when nothing listens on its port.
    pub async fn stop(&mut self) {
        self.server.stop().await;
    }

    /// Starts the stopped server on the same port and data; returns when it accepts connections.
    pub async fn start_again(&mut self) {
        self.server.start_again().await;
    }
}

async fn database(server: &Server) -> String {
    let port = server.port().to_string();
    let name = create_database("CREATE DATABASE {name}", |sql| {
        let mut psql = Command::new("psql");
        psql.args(["-X", "-h", "127.0.0.1", "-U", "postgres", "-d", "postgres", "-p", &port, "-q", "-c", sql]);
        psql
    });
    format!("postgres://postgres@127.0.0.1:{port}/{}", name.await)
}
