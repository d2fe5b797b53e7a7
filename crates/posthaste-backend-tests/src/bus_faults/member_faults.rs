use std::collections::BTreeSet;
use std::time::Duration;

use super::scene::stop;
use super::{Entry, Faulty, FaultyBus, LONG_LEASE, Place, SHORT_LEASE, Scene, Step, deliveries};

/// Long enough that a fault finds deliveries in flight.
const SLOW: Duration = Duration::from_millis(300);
const WORKERS: usize = 16;

/// A member is killed with deliveries in flight, twice. Others repeat these deliveries and no other.
pub async fn a_killed_member_repeats_only_its_deliveries_in_flight<B: FaultyBus>() {
    let mut scene = Scene::<B>::start(B::shared().await, SHORT_LEASE).await;
    let survivor = scene.member();
    survivor.wait_until("the first member delivers", |entries| deliveries(entries) > 50).await;
    let mut faults = Vec::new();
    for number in 1..=2 {
        let doomed = scene.member_with(WORKERS, SLOW);
        doomed.wait_until("the doomed member delivers", |entries| deliveries(entries) > 2 * WORKERS).await;
        faults.push(scene.fault(Faulty::Member(number), async { doomed.kill() }).await);
        let in_flight = scene.history().in_flight(number);
        assert!(!in_flight.is_empty(), "nothing was in flight");
        let is_repeated = |entries: &[Entry]| {
            let started: BTreeSet<Place> = started(entries).collect();
            in_flight.iter().all(|(place, _)| started.contains(place))
        };
        survivor.wait_until("the survivor takes over", is_repeated).await;
    }
    assert!(scene.finish(vec![survivor], &faults).await > 0, "the deliveries in flight were repeated");
}

/// A member is paused for longer than its lease. Another member takes over, and when the paused member continues, it has
/// lost its leases.
pub async fn a_paused_member_repeats_only_its_deliveries_in_flight<B: FaultyBus>() {
    let mut scene = Scene::<B>::start(B::shared().await, SHORT_LEASE).await;
    let members = vec![scene.member_with(WORKERS, SLOW), scene.member()];
    let mut faults = Vec::new();
    for round in 1..=2 {
        for member in &members {
            member.wait_until("a member delivers", |entries| deliveries(entries) > 2 * WORKERS * round).await;
        }
        let [paused, other] = &members[..] else { unreachable!("two members") };
        let mut in_flight = BTreeSet::new();
        let fault = scene.fault(Faulty::Member(0), async {
            paused.signal("STOP");
            in_flight = scene.history().in_flight(0);
            assert!(!in_flight.is_empty(), "nothing was in flight");
            let is_repeated = |entries: &[Entry]| {
                let started: BTreeSet<Place> = started(entries).collect();
                in_flight.iter().all(|(place, _)| started.contains(place))
            };
            other.wait_until("the other member takes over", is_repeated).await;
            paused.signal("CONT");
        });
        faults.push(fault.await);
        scene.until_members_go_on(&members).await;
        scene.history().check_lost(0, &in_flight);
    }
    scene.finish(members, &faults).await;
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

/// The records whose delivery has started.
fn started(entries: &[Entry]) -> impl Iterator<Item = Place> {
    entries.iter().filter(|entry| entry.step == Step::Started).map(|entry| entry.place)
}
