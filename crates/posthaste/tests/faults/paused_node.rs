//! A node is paused for longer than its lease and then continues.

use std::time::Duration;

use posthaste::Mode;
use posthaste_backend_tests::servers;

use crate::checker::History;
use crate::node::{Role, now_millis};
use crate::process::{Node, started, wait_until, written};

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_node_repeats_only_its_own_deliveries_on_postgres() {
    for mode in [Mode::MultiNode, Mode::ORDERED] {
        pause(&servers::postgres().await, mode);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_node_repeats_only_its_own_deliveries_on_mariadb() {
    for mode in [Mode::MultiNode, Mode::ORDERED] {
        pause(&servers::mariadb().await, mode);
    }
}

/// Pauses one of two nodes. When the paused node continues, it must not deliver events that the other node claimed
/// meanwhile. While it is paused, it must not block the settlements of the other node.
fn pause(url: &str, mode: Mode) {
    let folder = tempfile::tempdir().unwrap();
    let role = |name: &str, writes| Role {
        url: url.to_owned(),
        mode,
        diary: folder.path().join(name),
        work: Duration::from_millis(5),
        lease: Duration::from_secs(2),
        writes,
        enough: folder.path().join("enough"),
        keys: 10,
        name: name.to_owned(),
    };
    let (paused, other) = (Node::start(&role("paused", u32::MAX)), Node::start(&role("other", 0)));
    let mut faults = Vec::new();
    for round in 1..=2 {
        paused.wait_until("the node delivers", |entries| started(entries) > 100 * round);
        paused.signal("STOP");
        faults.push(now_millis());
        // This sleep, longer than the lease, is the fault itself. The test does not wait for anything here.
        std::thread::sleep(Duration::from_secs(5));
        paused.signal("CONT");
        faults.push(now_millis());
    }
    std::fs::write(folder.path().join("enough"), "").unwrap();
    let history = || History::new(vec![paused.entries(), other.entries()], faults.clone());
    paused.wait_until("everything is written", written);
    wait_until("everything that was committed is delivered", || history().is_complete());
    let summary = history().check();
    paused.stop();
    other.stop();
    // Each pause repeats at most the deliveries of its four workers that were in flight, or ended and not settled.
    assert!(summary.duplicates <= 100, "{summary:?}");
}
