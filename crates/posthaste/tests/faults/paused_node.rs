//! A node that stands still for longer than its lease, and wakes up as if nothing had been.

use std::time::Duration;

use posthaste::Mode;
use posthaste_testing::servers;

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

/// Two nodes, one of which is paused: it must not deliver what the other took over when it wakes up, and while it stands
/// still it must not keep the other from recording what that has delivered.
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
        paused.wait_until("it is at work", |entries| started(entries) > 100 * round);
        paused.signal("STOP");
        faults.push(now_millis());
        // Longer than its lease by the clock of the database: that is the fault, and not a wait for anything.
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
    // At most what its four workers had in hand, and what they had ended and not recorded, each time.
    assert!(summary.duplicates <= 100, "{summary:?}");
}
