use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::bus::{Bus, Consumer, Fetched, Position, Topics};
use posthaste_core::log::LogOptions;
use posthaste_core::{
    BusItem, BusSource, BusSourceOptions, DecodeError, Decoded, Delivery, FaultKind, Load, Outcome, Relay,
    RelayOptions, RetryPolicy, Settled, Sink, StoreError, Wakeup, lock,
};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::super::Violation;
use super::{GROUP, GroupSabotage, LEASE, TOPICS, World};

/// A process that reads the bus.
pub(super) struct Member {
    life: Arc<Life>,
    stop: CancellationToken,
    relay: JoinHandle<()>,
}

/// The state of a process. A crashed process takes no further step.
struct Life {
    world: World,
    number: usize,
    /// `None` after a crash.
    frozen_until: Mutex<Option<Instant>>,
}

impl Life {
    /// One step of the process: waits while it is frozen, and for ever if it has crashed.
    async fn step(&self) {
        loop {
            let until = *lock(&self.frozen_until);
            match until {
                None => std::future::pending().await,
                Some(until) if Instant::now() < until => sleep_until(until).await,
                Some(_) => return,
            }
        }
    }
}

impl Member {
    pub(super) async fn join(world: &World) -> Result<Self, Violation> {
        let options = LogOptions { lease: LEASE, ..LogOptions::default() };
        let bus = world.bus.another(options);
        let consumer = bus.subscribe(GROUP, Topics::Named(TOPICS.map(str::to_owned).to_vec())).await?;
        let number = world.ledger(|ledger| ledger.joined());
        let life = Arc::new(Life { world: world.clone(), number, frozen_until: Mutex::new(Some(Instant::now())) });
        let consumer =
            FaultyConsumer { life: life.clone(), consumer, fetched: Mutex::default(), has_lost: Mutex::new(false) };
        let decoding = life.clone();
        let options = BusSourceOptions {
            decode: Box::new(move |record| {
                let is_away = decoding.world.strikes(0.02);
                Box::pin(async move { if is_away { Err(outage()) } else { Ok(decoded(record)) } })
            }),
            dead_letter: None,
            defer_after: Duration::MAX,
            max_waiting: Load { items: 50, bytes: 1_000_000 },
        };
        let source = BusSource::new(GROUP, Arc::new(bus.clone()), Box::new(consumer), Arc::new(bus), options);
        let relay = RelayOptions {
            workers: 8,
            batch: 10,
            max_in_flight: 30,
            retry: RetryPolicy::Fixed { interval: Duration::from_secs(2), max_attempts: None },
            poll_interval: Duration::from_secs(1),
            drain: Duration::from_secs(300),
            ..RelayOptions::default()
        };
        let stop = CancellationToken::new();
        let relay = Relay::new("simulated", Arc::new(source), Arc::new(Listener(life.clone())), relay);
        Ok(Self { life, relay: tokio::spawn(relay.run(stop.clone())), stop })
    }

    /// Leaves the group in its own time.
    pub(super) fn leave(self) {
        self.stop.cancel();
    }

    /// Leaves the group and returns when it has left.
    pub(super) async fn stop(self) {
        self.stop.cancel();
        // It fails only if the relay panicked, and then records are lost.
        let _ = self.relay.await;
    }

    pub(super) fn crash(self) {
        *lock(&self.life.frozen_until) = None;
        self.life.world.ledger(|ledger| ledger.crashed(self.life.number));
        self.relay.abort();
    }

    pub(super) fn freeze(&self, time: Duration) {
        let until = Instant::now() + time;
        *lock(&self.life.frozen_until) = Some(until);
        self.life.world.ledger(|ledger| ledger.froze(self.life.number, until));
    }
}

fn outage() -> DecodeError {
    DecodeError::Outage(cut_off(FaultKind::Transient))
}

fn decoded(record: &Fetched) -> Decoded<String> {
    Decoded { value: record.key.clone(), budget: None, fair_key: None }
}

fn cut_off(kind: FaultKind) -> StoreError {
    StoreError::new("reach the bus", kind, "simulated")
}

/// The subscriber of one process.
struct Listener(Arc<Life>);

#[async_trait]
impl Sink for Listener {
    type Item = BusItem<String>;

    async fn deliver(&self, batch: Vec<Delivery<Self::Item>>) {
        let Life { world, number, .. } = &*self.0;
        for delivery in batch {
            self.0.step().await;
            let key = delivery.item().value.clone();
            let attempt = world.ledger(|ledger| ledger.delivery_starts(*number, &key));
            sleep(world.latency()).await;
            self.0.step().await;
            let outcome = world.outcome();
            world.ledger(|ledger| ledger.delivery_ends(&key, attempt, outcome == Outcome::Delivered));
            delivery.report(outcome);
        }
    }
}

/// The bus as a process sees it, with faults.
struct FaultyConsumer {
    life: Arc<Life>,
    consumer: Box<dyn Consumer>,
    /// For sabotage: what was fetched.
    fetched: Mutex<Vec<Position>>,
    has_lost: Mutex<bool>,
}

impl FaultyConsumer {
    /// Before a call: the bus may refuse it. Returns true if the answer will be lost.
    async fn before(&self) -> Result<bool, StoreError> {
        self.life.step().await;
        let world = &self.life.world;
        match world.strikes(0.03) {
            true => Err(cut_off(FaultKind::Transient)),
            false => Ok(world.strikes(0.03)),
        }
    }

    async fn after(&self, is_lost: bool) -> Result<(), StoreError> {
        self.life.step().await;
        if is_lost { Err(cut_off(FaultKind::OutcomeUnknown)) } else { Ok(()) }
    }

    async fn sabotage(&self, fetched: &mut Vec<Fetched>) -> Result<(), StoreError> {
        match self.life.world.sabotage {
            GroupSabotage::None => {}
            GroupSabotage::LoseOne => {
                if !fetched.is_empty() && !std::mem::replace(&mut *lock(&self.has_lost), true) {
                    let lost = fetched.remove(0);
                    self.consumer.ack(&[&lost.position]).await?;
                }
            }
            GroupSabotage::GiveUpInFlight => {
                let mut all = lock(&self.fetched);
                all.extend(fetched.iter().map(|fetched| fetched.position.clone()));
                let (kept, revoked): (Vec<_>, Vec<_>) = all.drain(..).partition(|position| self.may_start(position));
                *all = kept;
                if !revoked.is_empty() {
                    self.consumer.release(&revoked.iter().collect::<Vec<&Position>>());
                }
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Consumer for FaultyConsumer {
    async fn fetch(&self, limit: usize) -> Result<Vec<Fetched>, StoreError> {
        // The records of a lost answer would be handed out never again: a consumer keeps what it fetched.
        self.before().await?;
        let mut fetched = self.consumer.fetch(limit).await?;
        self.sabotage(&mut fetched).await?;
        Ok(fetched)
    }

    async fn ack(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        let is_lost = self.before().await?;
        let settled = self.consumer.ack(positions).await?;
        self.after(is_lost).await?;
        Ok(settled)
    }

    async fn flush(&self) -> Result<(), StoreError> {
        self.consumer.flush().await
    }

    fn release(&self, positions: &[&Position]) {
        self.life.world.ledger(|ledger| ledger.released += positions.len());
        self.consumer.release(positions);
    }

    fn may_start(&self, position: &Position) -> bool {
        self.consumer.may_start(position)
    }

    async fn renew(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        let is_lost = self.before().await?;
        let renewed = self.consumer.renew(positions).await?;
        self.after(is_lost).await?;
        Ok(renewed)
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.life.step().await;
        self.consumer.close().await
    }

    fn lease(&self) -> Duration {
        self.consumer.lease()
    }

    fn wakeup(&self) -> &Wakeup {
        self.consumer.wakeup()
    }

    fn revocations(&self) -> &Wakeup {
        self.consumer.revocations()
    }
}
