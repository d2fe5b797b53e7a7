//! A node is paused for longer than its lease and then continues.

use std::time::Duration;

use posthaste::Mode;
use posthaste_backend_tests::servers;

use crate::checker::{Fault, History};
use crate::database::done;
use crate::node::Role;
use crate::process::{Node, started, wait_until, written};

/// Longer than a busy machine pauses a node that the test does not pause.
const LEASE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_secs(8);
/// Four workers deliver about 80 events in the 100 ms within which a node settles them.
const UNSETTLED: usize = 100;

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_node_repeats_only_its_own_deliveries_on_postgres() {
    let (one, other) = (servers::postgres().await, servers::postgres().await);
    tokio::join!(pause(&one, Mode::MultiNode), pause(&other, Mode::ORDERED));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_node_repeats_only_its_own_deliveries_on_mariadb() {
    let (one, other) = (servers::mariadb().await, servers::mariadb().await);
    tokio::join!(pause(&one, Mode::MultiNode), pause(&other, Mode::ORDERED));
}

/// Pauses one of two nodes. When the paused node continues, it must not deliver events that the other node claimed
/// meanwhile. While it is paused, it must not block the settlements of the other node.
async fn pause(url: &str, mode: Mode) {
    let folder = tempfile::tempdir().unwrap();
    let role = |name: &str, writes| Role {
        url: url.to_owned(),
        mode,
        diary: folder.path().join(name),
        work: Duration::from_millis(5),
        lease: LEASE,
        writes,
        enough: folder.path().join("enough"),
        keys: 10,
        name: name.to_owned(),
    };
    let (paused, other) = (Node::start(&role("paused", u32::MAX)), Node::start(&role("other", 0)));
    let history = || History::new(vec![paused.entries(), other.entries()]);
    let mut faults = Vec::new();
    for round in 1..=2 {
        paused.wait_until("the node delivers", |entries| started(entries) > 100 * round).await;
        wait_until("the nodes settle what they deliver", async || {
            let (history, done) = (history(), done(url).await);
            history.ended().into_iter().filter(|id| !done.contains(*id)).count() <= UNSETTLED
        })
        .await;
        let fault = Fault::of(0, url, async {
            paused.signal("STOP");
            // This sleep, longer than the lease, is the fault itself. The test does not wait for anything here.
            tokio::time::sleep(PAUSE).await;
            paused.signal("CONT");
        });
        faults.push(Fault { is_pause: true, ..fault.await });
    }
    std::fs::write(folder.path().join("enough"), "").unwrap();
    paused.wait_until("everything is written", written).await;
    wait_until("everything that was committed is delivered", async || history().is_complete()).await;
    history().check(&faults);
    paused.stop();
    other.stop();
}
