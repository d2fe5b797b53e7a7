//! PostgreSQL.

use std::process::Command;

use tokio::sync::OnceCell;

use super::watched::{CrashableServer, Server, create_database};

const SCRIPT: &str = concat!(include_str!("postgres.sh"), include_str!("watch.sh"));

/// The URL of a new, empty database on a throwaway PostgreSQL. One server for a test binary, one database for a call.
///
/// The server is fast and loses commits in a crash: a test that crashes its server starts a [`Postgres`] of its own.
pub async fn postgres() -> String {
    static SERVER: OnceCell<Server> = OnceCell::const_new();
    let fast = "-c synchronous_commit=off -c full_page_writes=off";
    database(SERVER.get_or_init(|| Server::start(SCRIPT, fast)).await).await
}

/// A PostgreSQL for one test. A crash is an immediate stop.
pub struct Postgres;

impl Postgres {
    /// Starts a server that holds one empty database.
    pub async fn start() -> CrashableServer {
        Self::start_with("-c synchronous_commit=on").await
    }

    /// Starts a server with these settings on its command line, such as `-c fsync=on`.
    pub async fn start_with(settings: &str) -> CrashableServer {
        let server = Server::start(SCRIPT, settings).await;
        let url = database(&server).await;
        CrashableServer::new(server, url)
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
