use std::sync::Arc;
use std::time::Duration;

use posthaste_core::outbox::{Outbox, Retention, Settings, StartError};
use posthaste_core::{Event, Outcome, RetryPolicy};
use tokio::time::sleep;

use super::checker::Ended;
use super::store::{FaultyDatabase, FaultyStore};
use super::world::{Delivering, Fault, Life, Reaction, World};
use super::{LEASE, Violation};

/// The processes of one run.
pub(super) struct Nodes {
    world: World,
    nodes: Vec<Node>,
}

/// A service with an outbox.
#[derive(Clone)]
pub(super) struct Node {
    pub(super) life: Arc<Life>,
    pub(super) outbox: Outbox<FaultyStore>,
}

pub(super) const EVENT_TYPE: &str = "simulated";
pub(super) const AGGREGATE_TYPE: &str = "thing";

impl Nodes {
    pub(super) async fn start(world: &World, count: usize) -> Result<Self, Violation> {
        let mut nodes = Vec::with_capacity(count);
        for _ in 0..count {
            nodes.push(Node::start(world).await?);
        }
        Ok(Self { world: world.clone(), nodes })
    }

    pub(super) fn any(&self, chance: &mut fastrand::Rng) -> Node {
        self.nodes[chance.usize(0..self.nodes.len())].clone()
    }

    /// Replaces every crashed node by a new one. Sometimes stops a running node cleanly and replaces it.
    pub(super) async fn replace_crashed(&mut self, chance: &mut fastrand::Rng) -> Result<(), Violation> {
        for node in &mut self.nodes {
            let has_crashed = node.life.has_crashed();
            if !has_crashed && chance.f64() < 0.01 {
                node.stop().await;
            } else if !has_crashed {
                continue;
            }
            *node = Node::start(&self.world).await?;
        }
        Ok(())
    }

    pub(super) async fn stop(&mut self) {
        for node in &mut self.nodes {
            node.stop().await;
        }
    }
}

impl Node {
    async fn start(world: &World) -> Result<Self, StartError> {
        let life = Arc::new(Life::new(world));
        let settings = Settings {
            mode: world.mode,
            workers: 3,
            hot_queue: 4,
            cold_queue: 16,
            batch_size: 8,
            lease: LEASE,
            retry: RetryPolicy::Exponential {
                base: Duration::from_millis(200),
                max: Duration::from_secs(10),
                max_attempts: Some(4),
            },
            purge: Some(Retention {
                done: Some(Duration::from_secs(20)),
                batch_size: 5,
                interval: Duration::from_secs(7),
                ..Retention::default()
            }),
            ..Settings::default()
        };
        let listener = || {
            let (world, life) = (world.clone(), life.clone());
            move |event| deliver(world.clone(), life.clone(), event)
        };
        let outbox = Outbox::new(FaultyDatabase { world: world.clone(), life: life.clone() }).settings(settings);
        let outbox = outbox.on(EVENT_TYPE, listener()).on_aggregate(AGGREGATE_TYPE, EVENT_TYPE, listener());
        Ok(Self { outbox: outbox.start().await?, life })
    }

    async fn stop(&mut self) {
        // A process that stops too slowly is killed, as a supervisor would do. It may also crash while it stops.
        tokio::select! {
            biased;
            () = self.outbox.close() => {}
            () = self.life.crashed.notified() => {}
            () = sleep(Duration::from_secs(120)) => self.life.crash(),
        }
    }
}

/// The listener of a node, with faults.
async fn deliver(world: World, life: Arc<Life>, event: Arc<Event>) -> Outcome {
    if life.has_crashed() {
        std::future::pending::<()>().await;
    }
    let mut delivering = Delivering::start(&world, life.node, event.id());
    match world.reaction() {
        Reaction::Answer { after, outcome } => {
            sleep(after).await;
            life.step().await;
            delivering.ended = Ended::with(&outcome);
            drop(delivering);
            if world.fault() == Fault::Crash {
                life.suffer(Fault::Crash).await;
            }
            outcome
        }
        // Not panic!(), because the panic hook would print thousands of messages.
        Reaction::Panic => {
            delivering.ended = Ended::Counted;
            std::panic::resume_unwind(Box::new("simulated"))
        }
    }
}
