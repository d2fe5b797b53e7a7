//! The test kills one of two nodes again and again (`kill -9`), while both write and deliver.

use std::path::{Path, PathBuf};
use std::time::Duration;

use posthaste::Mode;
use posthaste_backend_tests::servers;

use crate::checker::History;
use crate::node::{Entry, Role, now_millis};
use crate::process::{Node, read, started, wait_until, written};

const LEASE: Duration = Duration::from_secs(2);

/// Processes that write to one SQLite file wait for its lock in no fair order. One process may wait for seconds until
/// it can renew a lease or settle a row.
const LEASE_OF_A_FILE: Duration = Duration::from_secs(6);

fn lease(url: &str) -> Duration {
    if url.starts_with("sqlite") { LEASE_OF_A_FILE } else { LEASE }
}

/// The history of the nodes, with the time that a settlement may take on this database.
fn history_of(url: &str, diaries: Vec<Vec<Entry>>, faults: Vec<u64>) -> History {
    let history = History::new(diaries, faults);
    if url.starts_with("sqlite") { history.settled_within(LEASE_OF_A_FILE.as_millis() as u64) } else { history }
}

fn role(url: &str, folder: &std::path::Path, name: &str, mode: Mode, writes: u32) -> Role {
    Role {
        url: url.to_owned(),
        mode,
        diary: folder.join(name),
        work: Duration::from_millis(3),
        lease: lease(url),
        writes,
        enough: folder.join("enough"),
        keys: 10,
        name: name.to_owned(),
    }
}

/// One node writes and delivers all the time. The other is killed while it does the same, and started again.
fn kill_again_and_again(url: &str, mode: Mode) -> History {
    let folder = tempfile::tempdir().unwrap();
    let steady = role(url, folder.path(), "steady", mode, u32::MAX);
    let survivor = Node::start(&steady);
    survivor.wait_until("the first delivery", |entries| started(entries) > 0);
    let (mut faults, mut diaries) = (Vec::new(), Vec::new());
    for round in 0..5 {
        let doomed = role(url, folder.path(), &format!("doomed{round}"), mode, u32::MAX);
        let node = Node::start(&doomed);
        node.wait_until("a few hundred deliveries", |entries| started(entries) > 100 + 50 * round);
        node.kill();
        faults.push(now_millis());
        diaries.push(doomed.diary);
    }
    until_all_is_delivered(url, folder.path(), survivor, &diaries, &faults)
}

/// Ends the writing, and waits until the surviving node has delivered everything.
fn until_all_is_delivered(url: &str, folder: &Path, survivor: Node, diaries: &[PathBuf], faults: &[u64]) -> History {
    let history = || {
        let mut all: Vec<_> = diaries.iter().map(read).collect();
        all.push(survivor.entries());
        history_of(url, all, faults.to_vec())
    };
    std::fs::write(folder.join("enough"), "").unwrap();
    survivor.wait_until("everything is written", written);
    wait_until("everything that was committed is delivered", || history().is_complete());
    let history = history();
    survivor.stop();
    history
}

fn check_killed(url: &str) {
    let summary = kill_again_and_again(url, Mode::MultiNode).check();
    assert!(summary.committed > 500, "{summary:?}");
}

/// The URL of a database file in this folder, which two processes share.
fn sqlite(folder: &tempfile::TempDir) -> String {
    format!("sqlite://{}?mode=rwc", folder.path().join("shared.db").display())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_node_loses_nothing_on_postgres() {
    check_killed(&servers::postgres().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_node_loses_nothing_on_mariadb() {
    check_killed(&servers::mariadb().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_node_loses_nothing_on_sqlite() {
    check_killed(&sqlite(&tempfile::tempdir().unwrap()));
}

#[tokio::test(flavor = "multi_thread")]
async fn order_survives_a_killed_node_on_postgres() {
    check_order_of_killed(&servers::postgres().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn order_survives_a_killed_node_on_mariadb() {
    check_order_of_killed(&servers::mariadb().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn order_survives_a_killed_node_on_sqlite() {
    check_order_of_killed(&sqlite(&tempfile::tempdir().unwrap()));
}

fn check_order_of_killed(url: &str) {
    let folder = tempfile::tempdir().unwrap();
    // Only one node writes, so that there is one order. Both deliver.
    let writer = role(url, folder.path(), "writer", Mode::ORDERED, u32::MAX);
    let survivor = Node::start(&writer);
    let (mut faults, mut diaries) = (Vec::new(), Vec::new());
    for round in 0..3 {
        let doomed = role(url, folder.path(), &format!("doomed{round}"), Mode::ORDERED, 0);
        let node = Node::start(&doomed);
        node.wait_until("some deliveries", |entries| started(entries) > 20);
        node.kill();
        faults.push(now_millis());
        diaries.push(doomed.diary);
    }
    let history = until_all_is_delivered(url, folder.path(), survivor, &diaries, &faults);
    history.check();
    history.check_order();
}

/// A node is killed between the claim and the settlement, in the middle of a batch. Events that were done stay done,
/// and the other node delivers the rest.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_in_the_middle_of_a_batch_leaves_the_rest_to_another_node() {
    let url = servers::postgres().await;
    let folder = tempfile::tempdir().unwrap();
    let mut first = role(&url, folder.path(), "first", Mode::MultiNode, 200);
    first.work = Duration::from_millis(20);
    let node = Node::start(&first);
    node.wait_until("everything is written", written);
    node.wait_until("the middle of the batch", |entries| started(entries) > 50);
    node.kill();
    let at = now_millis();
    let second = role(&url, folder.path(), "second", Mode::MultiNode, 0);
    let other = Node::start(&second);
    let history = || History::new(vec![read(&first.diary), other.entries()], vec![at]);
    wait_until("everything that was committed is delivered", || history().is_complete());
    let summary = history().check();
    other.stop();
    assert_eq!(summary.committed, 180);
    // Four workers were delivering, and the deliveries that they ended last may not have been settled.
    assert!(summary.duplicates < 50, "{summary:?}");
}
