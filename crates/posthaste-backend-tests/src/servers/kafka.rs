//! Kafka.

use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::OnceCell;

use super::watched::{CrashableServer, Server};

const SCRIPT: &str = concat!(include_str!("kafka.sh"), include_str!("watch.sh"));

/// The broker of a throwaway Kafka, as host:port, and a prefix for the names of topics and groups that no other caller
/// has. One server for a test binary.
pub async fn kafka() -> (String, String) {
    static SERVER: OnceCell<Server> = OnceCell::const_new();
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let server = SERVER.get_or_init(|| Server::start(SCRIPT, "")).await;
    (format!("127.0.0.1:{}", server.port()), format!("test{}.", NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// A Kafka of one broker for one test. A crash is a `kill -9`.
pub struct Kafka;

impl Kafka {
    /// Starts an empty broker. Its URL is its address as host:port.
    pub async fn start() -> CrashableServer {
        let server = Server::start(SCRIPT, "").await;
        let address = format!("127.0.0.1:{}", server.port());
        CrashableServer::new(server, address)
    }
}
