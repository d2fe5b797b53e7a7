//! A seeded simulation of relays on one store: crashes between any two steps, lost leases, slow and failing sinks.
//!
//! Everything random comes from one seed and time is tokio's paused clock, so a seed that fails fails again.
//! First comes a storm, in which every step may go wrong; then calm, in which everything must come to an end.

mod checker;
mod node;
mod world;

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::MemoryStore;
use node::Nodes;
use world::World;

pub use checker::Violation;

/// How a run differs from the ordinary, to show that the checker sees what it must see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    None,
    /// One claimed item is settled as done without a delivery.
    LoseOne,
    /// One claimed item is handed out twice.
    ClaimOneTwice,
    /// Runs of a key are delivered without waiting for their head.
    ForgetOrder,
}

/// What happened in one run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    pub items: usize,
    pub deliveries: usize,
    pub crashes: usize,
    pub duplicates: usize,
}

const LEASE: Duration = Duration::from_secs(30);

/// Runs one seed to its end.
pub fn simulate(seed: u64, sabotage: Sabotage) -> Result<Summary, Violation> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    match runtime {
        Ok(runtime) => runtime.block_on(run(seed, sabotage)),
        Err(error) => Err(Violation::new(format!("no runtime: {error}"))),
    }
}

async fn run(seed: u64, sabotage: Sabotage) -> Result<Summary, Violation> {
    let mut chance = fastrand::Rng::with_seed(seed);
    let store = MemoryStore::new(LEASE);
    let world = World::new(store.clone(), chance.fork(), sabotage);
    let mut nodes = Nodes::start(&world, chance.usize(1..=3));

    let items = chance.usize(10..=60);
    let keys = chance.usize(1..=8);
    for number in 0..items {
        let key =
            (chance.f64() < 0.5 || sabotage == Sabotage::ForgetOrder).then(|| format!("key-{}", chance.usize(0..keys)));
        let delay = if chance.f64() < 0.1 { Duration::from_secs(chance.u64(1..20)) } else { Duration::ZERO };
        store.insert(number, key.as_deref(), delay);
        if chance.f64() < 0.3 {
            sleep(Duration::from_millis(chance.u64(0..2_000))).await;
        }
        nodes.replace_fallen(&mut chance).await;
    }
    let storm = Duration::from_secs(chance.u64(10..120));
    let end = Instant::now() + storm;
    while Instant::now() < end {
        sleep(Duration::from_millis(chance.u64(100..3_000))).await;
        nodes.replace_fallen(&mut chance).await;
    }
    world.calm();
    settle_down(&world, &mut nodes, &mut chance).await?;
    nodes.stop().await;
    world.check()
}

/// With nothing going wrong any more, every item must be done; an operator replays what died in the storm.
async fn settle_down(world: &World, nodes: &mut Nodes, chance: &mut fastrand::Rng) -> Result<(), Violation> {
    let end = Instant::now() + Duration::from_secs(3_600);
    while Instant::now() < end {
        nodes.replace_fallen(chance).await;
        world.replay_dead();
        if world.all_done() {
            return Ok(());
        }
        sleep(Duration::from_secs(5)).await;
    }
    Err(world.unfinished())
}
