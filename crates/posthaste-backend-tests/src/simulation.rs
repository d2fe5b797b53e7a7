//! A seeded simulation of services that share one outbox, with crashes between any two steps, lost leases, lost
//! answers, and slow or failing listeners.
//!
//! Every node is a real [`Outbox`] on the in-memory database. All randomness comes from one seed and time is tokio's
//! paused clock, so a seed that fails once fails again. A run has two phases: a storm, in which every step may fail,
//! and calm, in which every event must be finished.

mod checker;
mod group;
mod history;
mod node;
mod store;
mod world;
mod writer;

use std::time::Duration;

use posthaste_core::StoreError;
use posthaste_core::outbox::{DeadFilter, Mode, Outbox, StartError};
use tokio::time::{Instant, sleep};

use node::Nodes;
use posthaste_testing::{MemoryDatabase, MemoryOutbox};
use world::World;

pub use checker::Violation;
pub use group::{GroupSabotage, GroupSummary, simulate_group};

/// A fault that breaks a promise on purpose, to show that the checker finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// No fault.
    None,
    /// One claimed event is settled as done without a delivery.
    LoseOne,
    /// A claim returns one event twice, in modes that lease rows.
    ClaimOneTwice,
    /// The events of a key are delivered without waiting for their head, in ordered mode.
    ForgetOrder,
    /// A rollback commits.
    CommitRollbacks,
    /// Every process believes that it owns the table, and settlements are accepted with any fencing token.
    IgnoreFence,
}

/// The counts of one run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Committed events.
    pub events: usize,
    /// Calls of listeners.
    pub deliveries: usize,
    /// Processes that crashed.
    pub crashes: usize,
    /// Successful deliveries of an event after its first successful delivery.
    pub duplicates: usize,
    /// Events that an operator discarded.
    pub discarded: usize,
    /// A hash of all deliveries with their nodes and times. Two runs with the same digest went the same way.
    pub digest: u64,
}

const LEASE: Duration = Duration::from_secs(30);
const TABLE: &str = "outbox_event";

/// Runs one seed to its end.
pub fn simulate(seed: u64, mode: Mode, sabotage: Sabotage) -> Result<Summary, Violation> {
    // The jitter of retries comes from the generator of this thread.
    fastrand::seed(seed);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    match runtime {
        Ok(runtime) => runtime.block_on(run(seed, mode, sabotage)),
        Err(error) => Err(Violation::new(format!("no runtime: {error}"))),
    }
}

async fn run(seed: u64, mode: Mode, sabotage: Sabotage) -> Result<Summary, Violation> {
    let mut chance = fastrand::Rng::with_seed(seed);
    let world = World::new(MemoryDatabase::new(), mode, chance.fork(), sabotage);
    let operator = Operator::start(&world).await?;
    let mut nodes = Nodes::start(&world, chance.usize(1..=3)).await?;

    for _ in 0..chance.usize(6..=24) {
        writer::start(&world, nodes.any(&mut chance), &mut chance);
        if chance.f64() < 0.6 {
            sleep(Duration::from_millis(chance.u64(0..3_000))).await;
        }
        nodes.replace_crashed(&mut chance).await?;
    }
    let storm = Instant::now() + Duration::from_secs(chance.u64(10..90));
    while Instant::now() < storm {
        sleep(Duration::from_millis(chance.u64(100..3_000))).await;
        nodes.replace_crashed(&mut chance).await?;
        if chance.f64() < 0.2 {
            operator.handle_dead_events(&mut chance).await?;
        }
    }
    world.calm();
    settle_down(&world, &operator, &mut nodes, &mut chance).await?;
    nodes.stop().await;
    world.check()
}

/// Without further faults every event must be finished. An operator replays or discards dead events.
async fn settle_down(
    world: &World,
    operator: &Operator,
    nodes: &mut Nodes,
    chance: &mut fastrand::Rng,
) -> Result<(), Violation> {
    let end = Instant::now() + Duration::from_secs(3_600);
    while Instant::now() < end {
        nodes.replace_crashed(chance).await?;
        operator.handle_dead_events(chance).await?;
        if world.is_all_done() {
            return Ok(());
        }
        sleep(Duration::from_secs(5)).await;
    }
    Err(world.unfinished())
}

/// An operator, whose process has no faults.
struct Operator {
    world: World,
    outbox: Outbox<MemoryOutbox>,
}

impl Operator {
    async fn start(world: &World) -> Result<Self, Violation> {
        let outbox = Outbox::new(world.database.clone()).mode(Mode::WriterOnly).start().await?;
        Ok(Self { world: world.clone(), outbox })
    }

    async fn handle_dead_events(&self, chance: &mut fastrand::Rng) -> Result<(), Violation> {
        for row in self.outbox.dead().list(&DeadFilter::all(), 100).await? {
            if chance.f64() < 0.8 {
                self.outbox.dead().replay(&row.event_id).await?;
                self.world.ledger(|ledger| ledger.replayed(row.seq));
            } else {
                self.outbox.dead().discard(&row.event_id).await?;
                self.world.ledger(|ledger| ledger.discarded(row.seq));
            }
        }
        Ok(())
    }
}

impl From<StartError> for Violation {
    fn from(error: StartError) -> Self {
        Self::new(format!("an outbox did not start: {error}"))
    }
}

impl From<StoreError> for Violation {
    fn from(error: StoreError) -> Self {
        Self::new(format!("the in-memory database failed: {}", error.chain()))
    }
}
