//! MariaDB.

use std::process::Command;

use tokio::sync::OnceCell;

use super::watched::{CrashableServer, Server, create_database};

const SCRIPT: &str = concat!(include_str!("mariadb.sh"), include_str!("watch.sh"));

/// The URL of a new, empty database (utf8mb4) on a throwaway MariaDB. One server for a test binary, one database for a
/// call.
///
/// The server is fast and loses commits in a crash: a test that crashes its server starts a [`MariaDb`] of its own.
pub async fn mariadb() -> String {
    static SERVER: OnceCell<Server> = OnceCell::const_new();
    let fast = "--innodb-flush-log-at-trx-commit=0 --skip-innodb-doublewrite";
    database(SERVER.get_or_init(|| Server::start(SCRIPT, fast)).await).await
}

/// A MariaDB for one test. A crash is a `kill -9`.
pub struct MariaDb;

impl MariaDb {
    /// Starts a server that holds one empty database.
    pub async fn start() -> CrashableServer {
        // A killed process may leave a page half written, so the doublewrite buffer stays on.
        let server = Server::start(SCRIPT, "--innodb-flush-log-at-trx-commit=2").await;
        let url = database(&server).await;
        CrashableServer::new(server, url)
    }
}

async fn database(server: &Server) -> String {
    let port = server.port().to_string();
    let name = create_database("CREATE DATABASE {name} CHARACTER SET utf8mb4", |sql| {
        let mut mariadb = Command::new("mariadb");
        mariadb.args(["--no-defaults", "-h", "127.0.0.1", "-u", "root", "-P", &port, "-e", sql]);
        mariadb
    });
    format!("mysql://root@127.0.0.1:{port}/{}", name.await)
}
