//! The test kills one of two nodes again and again (`kill -9`), while both write and deliver.

use std::path::{Path, PathBuf};
use std::time::Duration;

use posthaste::Mode;
use posthaste_backend_tests::servers;

use crate::checker::{Fault, History};
use crate::database::done;
use crate::node::Role;
use crate::process::{Node, read, started, wait_until, written};

/// A node that was not killed loses no lease, although a busy machine may pause it for seconds, and although processes
/// that write to one SQLite file wait for its lock in no fair order.
const LEASE: Duration = Duration::from_secs(6);

fn role(url: &str, folder: &Path, name: &str, mode: Mode, writes: u32) -> Role {
    Role {
        url: url.to_owned(),
        mode,
        diary: folder.join(name),
        work: Duration::from_millis(3),
        lease: LEASE,
        writes,
        enough: folder.join("enough"),
        keys: 10,
        name: name.to_owned(),
    }
}

/// One node writes and delivers all the time. The other is killed while it does the same, and started again.
async fn check_killed(url: &str) {
    let folder = tempfile::tempdir().unwrap();
    let steady = role(url, folder.path(), "steady", Mode::MultiNode, u32::MAX);
    let survivor = Node::start(&steady);
    survivor.wait_until("the first delivery", |entries| started(entries) > 0).await;
    let (mut faults, mut diaries) = (Vec::new(), Vec::new());
    for round in 0..5 {
        let doomed = role(url, folder.path(), &format!("doomed{round}"), Mode::MultiNode, u32::MAX);
        let node = Node::start(&doomed);
        node.wait_until("a few hundred deliveries", |entries| started(entries) > 100 + 50 * round).await;
        faults.push(Fault::of(round, url, async { node.kill() }).await);
        diaries.push(doomed.diary);
    }
    let committed = until_all_is_delivered(folder.path(), survivor, &diaries).await.check(&faults);
    assert!(committed > 500, "{committed}");
}

/// Ends the writing, and waits until the surviving node has delivered everything. Its diary is the last one.
async fn until_all_is_delivered(folder: &Path, survivor: Node, diaries: &[PathBuf]) -> History {
    let history = || {
        let mut all: Vec<_> = diaries.iter().map(read).collect();
        all.push(survivor.entries());
        History::new(all)
    };
    std::fs::write(folder.join("enough"), "").unwrap();
    survivor.wait_until("everything is written", written).await;
    wait_until("everything that was committed is delivered", async || history().is_complete()).await;
    let history = history();
    survivor.stop();
    history
}

/// The URL of a database file in this folder, which two processes share.
fn sqlite(folder: &tempfile::TempDir) -> String {
    format!("sqlite://{}?mode=rwc", folder.path().join("shared.db").display())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_node_loses_nothing_on_postgres() {
    check_killed(&servers::postgres().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_node_loses_nothing_on_mariadb() {
    check_killed(&servers::mariadb().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_node_loses_nothing_on_sqlite() {
    check_killed(&sqlite(&tempfile::tempdir().unwrap())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn order_survives_a_killed_node_on_postgres() {
    check_order_of_killed(&servers::postgres().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn order_survives_a_killed_node_on_mariadb() {
    check_order_of_killed(&servers::mariadb().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn order_survives_a_killed_node_on_sqlite() {
    check_order_of_killed(&sqlite(&tempfile::tempdir().unwrap())).await;
}

async fn check_order_of_killed(url: &str) {
    let folder = tempfile::tempdir().unwrap();
    // Only one node writes, so that there is one order. Both deliver.
    let writer = role(url, folder.path(), "writer", Mode::ORDERED, u32::MAX);
    let survivor = Node::start(&writer);
    let (mut faults, mut diaries) = (Vec::new(), Vec::new());
    for round in 0..3 {
        let doomed = role(url, folder.path(), &format!("doomed{round}"), Mode::ORDERED, 0);
        let node = Node::start(&doomed);
        node.wait_until("some deliveries", |entries| started(entries) > 20).await;
        faults.push(Fault::of(round, url, async { node.kill() }).await);
        diaries.push(doomed.diary);
    }
    let history = until_all_is_delivered(folder.path(), survivor, &diaries).await;
    history.check(&faults);
    history.check_order();
}

/// A node is killed between the claim and the settlement, in the middle of a batch. Events that were done stay done,
/// and the other node delivers the rest.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_in_the_middle_of_a_batch_leaves_the_rest_to_another_node() {
    let url = servers::postgres().await;
    let folder = tempfile::tempdir().unwrap();
    let mut first = role(&url, folder.path(), "first", Mode::MultiNode, 200);
    // The whole batch would take nine seconds, so that it does not end while the machine pauses the test.
    first.work = Duration::from_millis(200);
    let node = Node::start(&first);
    node.wait_until("everything is written", written).await;
    wait_until("some events are done", async || done(&url).await.len() > 20).await;
    let faults = [Fault::of(0, &url, async { node.kill() }).await];
    let second = role(&url, folder.path(), "second", Mode::MultiNode, 0);
    let other = Node::start(&second);
    let history = || History::new(vec![read(&first.diary), other.entries()]);
    wait_until("everything that was committed is delivered", async || history().is_complete()).await;
    assert_eq!(history().check(&faults), 180);
    assert!(started(&other.entries()) > 0, "the batch ended before the kill");
    other.stop();
}
