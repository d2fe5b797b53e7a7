use std::collections::BTreeSet;
use std::time::Duration;

use super::scene::stop;
use super::{Fault, Faulty, FaultyBus, LONG_LEASE, SHORT_LEASE, Scene, deliveries};
use crate::processes::{now_millis, wait_until};

/// Long enough that a fault finds deliveries in flight.
const SLOW: Duration = Duration::from_millis(300);
const WORKERS: usize = 16;

/// A member is killed with deliveries in flight. Another one repeats these deliveries and no other.
pub async fn a_killed_member_repeats_only_its_deliveries_in_flight<B: FaultyBus>() {
    let mut scene = Scene::<B>::start(B::shared().await, SHORT_LEASE).await;
    let (doomed, survivor) = (scene.member_with(WORKERS, SLOW), scene.member());
    for member in [&doomed, &survivor] {
        member.wait_until("a member delivers", |entries| deliveries(entries) > 2 * WORKERS).await;
    }
    let fault = scene.fault(Faulty::Member(0), async { doomed.kill() }).await;
    let in_flight = scene.history().in_flight(0);
    let repeated = scene.taken_over(in_flight, &survivor).await;
    assert!(!repeated.is_empty(), "nothing was in flight");
    scene.finish(vec![survivor], &[fault]).await;
}

/// A member is paused for longer than its lease. Another member takes over, and when the paused member continues, it has
/// lost its leases.
pub async fn a_paused_member_repeats_only_its_deliveries_in_flight<B: FaultyBus>() {
    let mut scene = Scene::<B>::start(B::shared().await, SHORT_LEASE).await;
    let members = [scene.member_with(WORKERS, SLOW), scene.member()];
    for member in &members {
        member.wait_until("a member delivers", |entries| deliveries(entries) > 2 * WORKERS).await;
    }
    let [paused, other] = &members;
    let mut repeated = BTreeSet::new();
    let fault = scene.fault(Faulty::Member(0), async {
        paused.pause().await;
        let lease_ends = now_millis() + SHORT_LEASE.as_millis() as u64;
        repeated = scene.taken_over(scene.history().in_flight(0), other).await;
        wait_until("the lease has ended", async || now_millis() > lease_ends).await;
        paused.signal("CONT");
    });
    let fault = Fault { is_pause: true, ..fault.await };
    assert!(!repeated.is_empty(), "nothing was in flight");
    scene.until_members_go_on(&members).await;
    scene.history().check_lost(0, &repeated);
    let [paused, other] = members;
    stop(vec![paused]).await;
    scene.finish(vec![other], &[fault]).await;
}

/// Members join and leave while records flow. Nothing is repeated.
pub async fn members_that_come_and_go_repeat_nothing<B: FaultyBus>() {
    let mut scene = Scene::<B>::start(B::shared().await, LONG_LEASE).await;
    let mut members = vec![scene.member()];
    for count in [2, 3, 2, 3, 1, 2] {
        while members.len() > count {
            stop(vec![members.remove(0)]).await;
        }
        while members.len() < count {
            members.push(scene.member());
        }
        scene.until_members_go_on(&members).await;
    }
    assert_eq!(scene.finish(members, &[]).await, 0);
}
