//! The database crashes under load and starts again.

use std::time::Duration;

use posthaste::Mode;
use posthaste_backend_tests::servers;

use crate::checker::History;
use crate::node::{Role, now_millis};
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
            lease: Duration::from_secs(3),
            writes: u32::MAX,
            enough: folder.path().join("enough"),
            keys: 10,
            name: "node".to_owned(),
        };
        let node = Node::start(&role);
        let mut faults = Vec::new();
        for round in 1..=2 {
            node.wait_until("the node delivers", |entries| started(entries) > 300 * round);
            faults.push(now_millis());
            server.restart().await;
            faults.push(now_millis());
        }
        std::fs::write(folder.path().join("enough"), "").unwrap();
        let history = || History::new(vec![node.entries()], faults.clone());
        node.wait_until("everything is written", written);
        wait_until("everything that was committed is delivered", || history().is_complete());
        let summary = history().check();
        assert!(summary.committed > 500, "{summary:?}");
        node.stop();
    }
}
