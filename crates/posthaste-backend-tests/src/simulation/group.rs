//! A seeded simulation of a group that reads a bus: members come, go, crash and are paused while records are delivered,
//! so that partitions are revoked at any moment.
//!
//! Every member is a real [`Relay`] on the in-memory log. As in the simulation of the outbox, a run has a storm and a
//! calm, and the same seed makes the same run.

mod checker;
mod member;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthaste_core::bus::{Bus, Record, Topics};
use posthaste_core::{Failure, Outcome, lock};
use tokio::time::{Instant, sleep};

use self::checker::Ledger;
use self::member::Member;
use super::{LEASE, Violation};
use crate::MemoryBus;

const GROUP: &str = "group";
const TOPICS: [&str; 2] = ["orders", "payments"];
const MAX_MEMBERS: usize = 4;

/// A fault that breaks a promise on purpose, to show that the checker finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupSabotage {
    /// No fault.
    None,
    /// Every member acks one record without a delivery.
    LoseOne,
    /// A member gives up revoked partitions while their records are being delivered.
    GiveUpInFlight,
}

/// The counts of one run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupSummary {
    /// Published records.
    pub records: usize,
    /// Deliveries that started.
    pub deliveries: usize,
    /// Successful deliveries of a record after its first successful delivery.
    pub duplicates: usize,
    /// Members that crashed.
    pub crashes: usize,
    /// Records that were given up because their partition was revoked.
    pub released: usize,
    /// A hash of all deliveries with their members and times. Two runs with the same digest went the same way.
    pub digest: u64,
}

/// Runs one seed to its end.
pub fn simulate_group(seed: u64, sabotage: GroupSabotage) -> Result<GroupSummary, Violation> {
    // The jitter of retries and the names of members come from the generator of this thread.
    fastrand::seed(seed);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    match runtime {
        Ok(runtime) => runtime.block_on(run(seed, sabotage)),
        Err(error) => Err(Violation::new(format!("no runtime: {error}"))),
    }
}

/// What all members of one run share.
#[derive(Clone)]
struct World {
    bus: MemoryBus,
    sabotage: GroupSabotage,
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    chance: fastrand::Rng,
    stormy: bool,
    ledger: Ledger,
}

impl World {
    fn ledger<R>(&self, tell: impl FnOnce(&mut Ledger) -> R) -> R {
        tell(&mut lock(&self.inner).ledger)
    }

    /// Draws at random; true with this probability, and only in the storm.
    fn strikes(&self, probability: f64) -> bool {
        let mut inner = lock(&self.inner);
        inner.stormy && inner.chance.f64() < probability
    }

    fn latency(&self) -> Duration {
        let mut inner = lock(&self.inner);
        match inner.chance.u32(0..20) {
            // Shorter than the time that a member has to give up a partition.
            0 => Duration::from_millis(inner.chance.u64(1_000..40_000)),
            1..8 => Duration::from_millis(inner.chance.u64(1..3_000)),
            _ => Duration::ZERO,
        }
    }

    fn outcome(&self) -> Outcome {
        let mut inner = lock(&self.inner);
        match inner.chance.u32(0..100) {
            0..10 if inner.stormy => Outcome::Failed(Failure::transient("503", "down")),
            10..14 if inner.stormy => Outcome::Failed(Failure::outage("endpoint", "gone")),
            14..17 if inner.stormy => Outcome::Snoozed { wait: Duration::from_millis(inner.chance.u64(0..30_000)) },
            _ => Outcome::Delivered,
        }
    }

    async fn publish(&self, chance: &mut fastrand::Rng) -> Result<(), Violation> {
        let topic = TOPICS[chance.usize(0..TOPICS.len())];
        let mut records = Vec::new();
        for _ in 0..chance.usize(1..40) {
            let key = self.ledger(Ledger::published);
            let value = key.clone().into();
            records.push(Record { topic: topic.into(), route: chance.u64(..), key, value, headers: Vec::new() });
        }
        let published: Result<Vec<()>, _> = self.bus.publish(records).await.into_iter().collect();
        published.map(|_| ()).map_err(|error| Violation::new(format!("the in-memory bus failed: {error}")))
    }
}

async fn run(seed: u64, sabotage: GroupSabotage) -> Result<GroupSummary, Violation> {
    let mut chance = fastrand::Rng::with_seed(seed);
    let partitions = chance.u32(1..=4);
    let inner = Inner { chance: chance.fork(), stormy: true, ledger: Ledger::new() };
    let world = World { bus: MemoryBus::new(partitions, LEASE), sabotage, inner: Arc::new(Mutex::new(inner)) };
    let mut members = vec![Member::join(&world).await?];
    for _ in 0..chance.usize(20..80) {
        sleep(Duration::from_millis(chance.u64(0..4_000))).await;
        let one = chance.usize(0..members.len());
        match chance.u32(0..100) {
            0..50 => world.publish(&mut chance).await?,
            50..72 if members.len() < MAX_MEMBERS => members.push(Member::join(&world).await?),
            72..90 if members.len() > 1 => members.remove(one).leave(),
            90..95 => {
                members.remove(one).crash();
                members.push(Member::join(&world).await?);
            }
            95.. => members[one].freeze(Duration::from_secs(chance.u64(1..90))),
            _ => {}
        }
    }
    lock(&world.inner).stormy = false;
    let end = Instant::now() + Duration::from_secs(3_600);
    while !world.ledger(|ledger| ledger.is_all_delivered()) {
        if Instant::now() > end {
            break;
        }
        sleep(Duration::from_secs(5)).await;
    }
    for member in members {
        member.stop().await;
    }
    check_acks(&world).await?;
    world.ledger(|ledger| ledger.check())
}

/// After every member has stopped, the group has acked every record.
async fn check_acks(world: &World) -> Result<(), Violation> {
    let failed = |error: posthaste_core::StoreError| Violation::new(error.chain());
    // The leases of crashed members end first.
    sleep(2 * LEASE).await;
    let next = world.bus.subscribe(GROUP, Topics::Named(TOPICS.map(str::to_owned).to_vec())).await.map_err(failed)?;
    let left = next.fetch(10).await.map_err(failed)?;
    match left.first() {
        None => Ok(()),
        Some(record) => Err(Violation::new(format!("record {} was not acked", record.key))),
    }
}
