//! Apicurio Registry, a Schema Registry with Confluent's REST API.

use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::OnceCell;

use super::watched::Server;

const SCRIPT: &str = concat!(include_str!("apicurio.sh"), include_str!("watch.sh"));

/// The URL of a throwaway Apicurio Registry, and a prefix for the names of subjects that no other caller has. One server
/// for a test binary.
pub async fn apicurio() -> (String, String) {
    static SERVER: OnceCell<Server> = OnceCell::const_new();
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let server = SERVER.get_or_init(|| Server::start(SCRIPT, "")).await;
    let url = format!("http://127.0.0.1:{}/apis/ccompat/v7", server.port());
    (url, format!("test{}.", NEXT.fetch_add(1, Ordering::Relaxed)))
}
