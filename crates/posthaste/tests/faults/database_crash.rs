//! The database crashes under load and starts again.

use std::time::Duration;

use posthaste::Mode;
use posthaste_backend_tests::servers;

use crate::checker::{Fault, History};
use crate::node::Role;
use crate::process::{Node, started, wait_until, written};

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_postgres_under_load_loses_nothing() {
    for mode in [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED] {
        let mut server = servers::Postgres::start().await;
        let folder = tempfile::tempdir().unwrap();
        let role = Role {
            url: server.url().to_owned(),
            mode,
            diary: folder.path().join("node"),
            work: Duration::ZERO,
            lease: Duration::from_secs(6),
            writes: u32::MAX,
            enough: folder.path().join("enough"),
            keys: 10,
            name: "node".to_owned(),
        };
        let node = Node::start(&role);
        let mut faults = Vec::new();
        for round in 1..=2 {
            node.wait_until("the node delivers", |entries| started(entries) > 300 * round).await;
            faults.push(Fault::of(0, &role.url, server.restart()).await);
        }
        std::fs::write(folder.path().join("enough"), "").unwrap();
        let history = || History::new(vec![node.entries()]);
        node.wait_until("everything is written", written).await;
        wait_until("everything that was committed is delivered", async || history().is_complete()).await;
        let committed = history().check(&faults);
        assert!(committed > 500, "{committed}");
        node.stop();
    }
}
