use std::time::Duration;

use super::scene::stop;
use super::{Address, Faulty, FaultyBus, LONG_LEASE, SHORT_LEASE, Scene, deliveries};
use crate::processes::{now_millis, wait_until};

/// How long the server is out of reach: longer than a lease, and than any request waits for an answer.
const OUTAGE: Duration = Duration::from_secs(60);
/// After this time a member that cannot reach the server starts nothing, even on a busy machine.
const NOTHING_STARTS_AFTER: Duration = SHORT_LEASE.saturating_add(Duration::from_secs(1));
/// Members that are slower than the publisher.
const SLOW: Duration = Duration::from_millis(200);
const WORKERS: usize = 8;
/// Two such members need ten seconds for so many records, which is longer than a lease.
const BACKLOG: usize = 800;

/// The server is killed and started again while records are published, delivered and acked. No lease ends, so no
/// delivery is repeated.
pub async fn a_server_that_crashes_loses_and_repeats_nothing<B: FaultyBus>() {
    let (mut server, cutter) = B::start().await;
    let mut scene = Scene::<B>::start(Address::of(cutter.url()), LONG_LEASE).await;
    let members = vec![scene.member(), scene.member()];
    for member in &members {
        member.wait_until("a member delivers", |entries| deliveries(entries) > 100).await;
    }
    server.restart().await;
    scene.until_members_go_on(&members).await;
    assert_eq!(scene.finish(members, &[]).await, 0);
}

/// The server is out of reach for longer than a lease. The members have read far ahead, but start nothing when their
/// leases may have ended, and repeat only deliveries whose ack was not durable.
pub async fn a_server_out_of_reach_for_longer_than_a_lease_loses_nothing<B: FaultyBus>() {
    let (_server, cutter) = B::start().await;
    let mut scene = Scene::<B>::start(Address::of(cutter.url()), SHORT_LEASE).await;
    wait_until("records wait", async || scene.published() > BACKLOG).await;
    let members = vec![scene.member_with(WORKERS, SLOW), scene.member_with(WORKERS, SLOW)];
    for member in &members {
        member.wait_until("a member delivers", |entries| deliveries(entries) > 50).await;
    }
    let mut restored_at = 0;
    let fault = scene.fault(Faulty::Server, async {
        cutter.take_away().await;
        // This sleep is the fault itself. The test does not wait for anything here.
        tokio::time::sleep(OUTAGE).await;
        restored_at = now_millis();
        cutter.restore();
        scene.until_members_go_on(&members).await;
    });
    let fault = fault.await;
    let late = fault.from + NOTHING_STARTS_AFTER.as_millis() as u64;
    let late = scene.history().starts().filter(|at| (late..restored_at).contains(at)).count();
    assert_eq!(late, 0, "deliveries started when the leases had ended");
    let fast = scene.member();
    stop(members).await;
    scene.finish(vec![fast], &[fault]).await;
}
