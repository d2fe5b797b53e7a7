use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use posthaste_core::{
    Claim, Claimed, Delivery, Disposition, FaultKind, OnStop, Outcome, Relay, RelayOptions, RetryPolicy, Settled,
    Settlement, Sink, Source, StoreError, Wakeup,
};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::Sabotage;
use super::world::{Fault, Reaction, World};
use crate::memory::{MemoryItem, MemorySource};

/// The processes of one run.
pub(super) struct Nodes {
    world: World,
    nodes: Vec<Node>,
}

struct Node {
    life: Arc<Life>,
    stop: CancellationToken,
    running: JoinHandle<()>,
}

/// Whether a process still runs. A fallen one takes no further step, wherever it is.
struct Life {
    fallen: AtomicBool,
    fell: Notify,
    frozen_until: std::sync::Mutex<Option<Instant>>,
}

impl Nodes {
    pub(super) fn start(world: &World, count: usize) -> Self {
        let nodes = (0..count).map(|_| Node::start(world)).collect();
        Self { world: world.clone(), nodes }
    }

    /// Starts anew what has crashed; now and then stops one in good order and starts another.
    pub(super) async fn replace_fallen(&mut self, chance: &mut fastrand::Rng) {
        for node in &mut self.nodes {
            if node.life.fallen.load(Ordering::Relaxed) {
                node.running.abort();
                let _ = (&mut node.running).await;
                *node = Node::start(&self.world);
            } else if chance.f64() < 0.01 {
                node.stop().await;
                *node = Node::start(&self.world);
            }
        }
    }

    pub(super) async fn stop(&mut self) {
        for node in &mut self.nodes {
            node.stop().await;
        }
    }
}

impl Node {
    fn start(world: &World) -> Self {
        let life = Arc::new(Life {
            fallen: AtomicBool::new(false),
            fell: Notify::new(),
            frozen_until: std::sync::Mutex::new(None),
        });
        let source = world.store.source();
        let owner = source.owner();
        let source = Arc::new(FaultySource { world: world.clone(), life: life.clone(), source });
        let sink = Arc::new(FaultySink { world: world.clone(), life: life.clone(), owner });
        let jitter = world.clone();
        let options = RelayOptions {
            workers: 3,
            chunk: 2,
            batch: 8,
            max_in_flight: 16,
            poll_interval: Duration::from_secs(5),
            retry: RetryPolicy::Exponential {
                base: Duration::from_millis(200),
                max: Duration::from_secs(10),
                max_attempts: Some(4),
            },
            settle_batch: 4,
            drain: Duration::from_secs(5),
            on_stop: if world.draw() < 0.5 { OnStop::Deliver } else { OnStop::Release },
            jitter: Arc::new(move || jitter.draw()),
            ..RelayOptions::default()
        };
        let stop = CancellationToken::new();
        let running = tokio::spawn(Relay::new("simulated", source, sink, options).run(stop.clone()));
        Self { life, stop, running }
    }

    async fn stop(&mut self) {
        self.stop.cancel();
        // A process that falls while it stops is killed, as a supervisor would do.
        tokio::select! {
            biased;
            _ = &mut self.running => {}
            () = self.life.fell.notified() => {}
            () = sleep(Duration::from_secs(120)) => {}
        }
        self.life.fallen.store(true, Ordering::Relaxed);
        self.running.abort();
    }
}

impl Life {
    /// One step of the process: returns unless the process is frozen or has fallen.
    async fn step(&self) {
        loop {
            if self.fallen.load(Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
            let frozen = *self.frozen_until.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            match frozen {
                Some(until) if Instant::now() < until => sleep_until(until).await,
                _ => return,
            }
        }
    }

    async fn suffer(&self, fault: Fault) {
        match fault {
            Fault::Crash => {
                self.fallen.store(true, Ordering::Relaxed);
                self.fell.notify_one();
            }
            Fault::Freeze(time) => {
                let until = Instant::now() + time;
                *self.frozen_until.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(until);
            }
            Fault::None | Fault::Refuse | Fault::LoseAnswer => {}
        }
        self.step().await;
    }
}

/// The store, as a process with faults sees it.
struct FaultySource {
    world: World,
    life: Arc<Life>,
    source: MemorySource<usize>,
}

fn unavailable() -> StoreError {
    StoreError::new("reach the store", FaultKind::Passing, std::io::Error::other("simulated"))
}

impl FaultySource {
    async fn before(&self) -> Result<Fault, StoreError> {
        let fault = self.world.fault();
        self.life.suffer(fault).await;
        match fault {
            Fault::Refuse => Err(unavailable()),
            fault => Ok(fault),
        }
    }

    async fn after(&self, before: Fault) -> Result<(), StoreError> {
        self.life.suffer(self.world.fault()).await;
        match before {
            Fault::LoseAnswer => Err(unavailable()),
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl Source for FaultySource {
    type Item = MemoryItem<usize>;

    async fn claim(&self, limit: usize) -> Result<Claim<Self::Item>, StoreError> {
        let fault = self.before().await?;
        let mut claim = self.source.claim(limit).await?;
        self.after(fault).await?;
        if !claim.items.is_empty() && self.world.sabotage_now(Sabotage::ClaimOneTwice) {
            claim.items.push(claim.items[0].clone());
        }
        if !claim.items.is_empty() && self.world.sabotage_now(Sabotage::LoseOne) {
            let lost = claim.items.remove(0);
            let settlement = Settlement { claimed: &lost, disposition: &Disposition::Done, took: Duration::ZERO };
            self.source.settle(&[settlement]).await?;
        }
        if self.world.sabotage == Sabotage::ForgetOrder {
            claim.items.iter_mut().for_each(|claimed| claimed.key = None);
        }
        Ok(claim)
    }

    async fn settle(&self, settlements: &[Settlement<'_, Self::Item>]) -> Result<Vec<Settled>, StoreError> {
        let fault = self.before().await?;
        let settled = self.source.settle(settlements).await?;
        for (settlement, settled) in settlements.iter().zip(&settled) {
            if *settled == Settled::Applied {
                let done = *settlement.disposition == Disposition::Done;
                let terminal = done || matches!(settlement.disposition, Disposition::Dead(_));
                self.world.applied(settlement.claimed.item.seq, terminal, done);
            }
        }
        self.after(fault).await?;
        Ok(settled)
    }

    async fn renew(&self, held: &[&Claimed<Self::Item>]) -> Result<Vec<Settled>, StoreError> {
        let fault = self.before().await?;
        let renewed = self.source.renew(held).await?;
        self.after(fault).await?;
        Ok(renewed)
    }

    async fn release(&self, held: &[&Claimed<Self::Item>]) -> Result<(), StoreError> {
        let fault = self.before().await?;
        self.source.release(held).await?;
        self.after(fault).await
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.source.close().await
    }

    fn lease(&self) -> Duration {
        self.source.lease()
    }

    fn wakeup(&self) -> &Wakeup {
        self.source.wakeup()
    }
}

/// The subscriber, as a process with faults reaches it.
struct FaultySink {
    world: World,
    life: Arc<Life>,
    owner: u64,
}

#[async_trait]
impl Sink for FaultySink {
    type Item = MemoryItem<usize>;

    async fn deliver(&self, batch: Vec<Delivery<Self::Item>>) {
        join_all(batch.into_iter().map(|delivery| self.deliver_one(delivery))).await;
    }
}

impl FaultySink {
    async fn deliver_one(&self, delivery: Delivery<MemoryItem<usize>>) {
        if self.life.fallen.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        let seq = delivery.item().seq;
        self.world.delivery_starts(self.owner, delivery.item());
        let mut unanswered = Unanswered { world: &self.world, seq, answered: false };
        match self.world.reaction() {
            Reaction::Answer { after, outcome } => {
                sleep(after).await;
                self.life.step().await;
                unanswered.answered = true;
                if outcome == Outcome::Delivered {
                    self.world.delivered(seq);
                }
                if self.world.fault() == Fault::Crash {
                    self.life.suffer(Fault::Crash).await;
                }
                delivery.report(outcome);
            }
            // Not panic!(): the hook would print thousands of them.
            Reaction::Panic => std::panic::resume_unwind(Box::new("simulated")),
            Reaction::Silence => drop(delivery),
        }
    }
}

/// Tells the world of a delivery whose task was dropped before its answer.
struct Unanswered<'a> {
    world: &'a World,
    seq: u64,
    answered: bool,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.world.cut_off(self.seq);
        }
    }
}
