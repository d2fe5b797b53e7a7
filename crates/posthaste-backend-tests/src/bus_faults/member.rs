use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use posthaste_core::bus::{Consumer, Fetched, Poison, Position, Quarantine, Topics};
use posthaste_core::{
    BusItem, BusSource, BusSourceOptions, DecodeError, Decoded, Delivery, Load, Outcome, Relay, RelayOptions, Settled,
    Sink, StoreError, Wakeup,
};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::{Address, FaultyBus};
use crate::processes::{Diary, Role, now_millis, until_stopped};

/// Every member holds one record of this many: it does not deliver and never acks it.
const HELD: u32 = 25;
/// The threads that run the tasks of a member.
pub(super) const THREADS: usize = 2;

/// True if members never ack the record with this number.
pub(super) fn is_held(number: u32) -> bool {
    number % HELD == 7
}

/// The task of a member: it delivers the records of the topic until its stdin ends.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Member {
    /// Where the bus is.
    pub address: Address,
    /// The length of a lease, or of a session.
    pub lease: Duration,
    /// How many records are delivered at once.
    pub workers: usize,
    /// The duration of a delivery.
    pub work: Duration,
    /// The file that gets one line per entry.
    pub diary: PathBuf,
}

impl Role for Member {
    const TEST: &'static str = "serve_when_started_as_a_member";
    type Entry = Entry;

    fn diary(&self) -> &Path {
        &self.diary
    }
}

/// The place of a record in the topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    /// The partition of the topic.
    pub partition: u32,
    /// The offset in the partition.
    pub offset: i64,
}

impl Place {
    pub(super) fn of(position: &Position) -> Self {
        Self { partition: position.partition, offset: position.offset }
    }
}

/// One line of the diary of a member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// What happened to a record.
    pub step: Step,
    /// The record.
    pub place: Place,
    /// The generation under which it was fetched.
    pub generation: i64,
    /// When, in milliseconds since 1970.
    pub at: u64,
}

/// What happened to a record in a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// The consumer returned the record with this number.
    Fetched(u32),
    /// Its delivery starts.
    Started,
    /// Its delivery is about to succeed.
    Ended,
    /// The member holds it: it does not deliver and never acks it.
    Held,
    /// The ack was applied.
    Acked,
    /// The lease was lost before the ack.
    LostLease,
}

/// The delivery of a record by one member: it fetches a record once under each generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Delivered {
    /// The record.
    pub place: Place,
    /// The generation under which it was fetched.
    pub generation: i64,
}

impl Entry {
    /// The delivery that the entry is about.
    pub fn delivered(&self) -> Delivered {
        Delivered { place: self.place, generation: self.generation }
    }

    fn new(step: Step, position: &Position) -> Self {
        Self { step, place: Place::of(position), generation: position.generation, at: now_millis() }
    }
}

/// Runs a member if this program was started as one, and does nothing otherwise.
pub fn serve_if_started_as_a_member<B: FaultyBus>() {
    if let Some(member) = Member::of_environment() {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        runtime.worker_threads(THREADS).enable_all().build().expect("a runtime").block_on(serve::<B>(member));
    }
}

/// Relays records from the bus to a sink that only takes time, until stdin ends.
async fn serve<B: FaultyBus>(member: Member) {
    let diary = Diary::open(&member);
    let bus = B::open(&member.address, member.lease).await;
    let (group, topics) = (member.address.group(), Topics::Named(vec![member.address.topic()]));
    let consumer = bus.subscribe(&group, topics).await.expect("a member can join its group");
    let consumer = Box::new(ObservedConsumer { consumer, diary: diary.clone() });
    let options = BusSourceOptions {
        decode: Box::new(|fetched| async move { decoded(fetched) }.boxed()),
        dead_letter: None,
        defer_after: Duration::MAX,
        max_waiting: Load { items: 1_000_000, bytes: 1 << 30 },
    };
    let source = BusSource::new(group, bus, consumer, Arc::new(NoQuarantine), options);
    let sink = Arc::new(Work { diary, duration: member.work });
    let options = RelayOptions {
        workers: member.workers,
        batch: 50,
        max_in_flight: 100,
        poll_interval: Duration::from_millis(200),
        ..RelayOptions::default()
    };
    let stop = CancellationToken::new();
    let relay = Relay::new("member", Arc::new(source), sink, options).run(stop.clone());
    tokio::join!(relay, async {
        until_stopped().await;
        stop.cancel();
    });
}

fn decoded(fetched: &Fetched) -> Result<Decoded<u32>, DecodeError> {
    let number = number(fetched);
    Ok(Decoded { value: number, budget: None, fair_key: None })
}

/// The number of a record.
pub(super) fn number(fetched: &Fetched) -> u32 {
    fetched.key.parse().unwrap_or_else(|_| panic!("{:?} was not published by this test", fetched.key))
}

/// A sink whose deliveries take time and always succeed.
struct Work {
    diary: Diary<Entry>,
    duration: Duration,
}

#[async_trait]
impl Sink for Work {
    type Item = BusItem<u32>;

    async fn deliver(&self, batch: Vec<Delivery<Self::Item>>) {
        for delivery in batch {
            let position = delivery.item().position.clone();
            if is_held(*delivery.item().value) {
                self.diary.write(&Entry::new(Step::Held, &position));
                delivery.report(Outcome::Snoozed { wait: Duration::from_secs(3_600) });
                continue;
            }
            self.diary.write(&Entry::new(Step::Started, &position));
            tokio::time::sleep(self.duration).await;
            self.diary.write(&Entry::new(Step::Ended, &position));
            delivery.report(Outcome::Delivered);
        }
    }
}

/// A consumer that writes down what it fetches and acks.
struct ObservedConsumer {
    consumer: Box<dyn Consumer>,
    diary: Diary<Entry>,
}

#[async_trait]
impl Consumer for ObservedConsumer {
    async fn fetch(&self, limit: usize) -> Result<Vec<Fetched>, StoreError> {
        let fetched = self.consumer.fetch(limit).await?;
        for record in &fetched {
            self.diary.write(&Entry::new(Step::Fetched(number(record)), &record.position));
        }
        Ok(fetched)
    }

    async fn ack(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        let settled = self.consumer.ack(positions).await?;
        for (position, settled) in positions.iter().zip(&settled) {
            let step = match settled {
                Settled::Applied => Step::Acked,
                Settled::LostLease => Step::LostLease,
                Settled::Locked => panic!("a bus locks no record"),
            };
            self.diary.write(&Entry::new(step, position));
        }
        Ok(settled)
    }

    async fn flush(&self) -> Result<(), StoreError> {
        self.consumer.flush().await
    }

    fn release(&self, positions: &[&Position]) {
        self.consumer.release(positions);
    }

    fn may_start(&self, position: &Position) -> bool {
        self.consumer.may_start(position)
    }

    async fn renew(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        self.consumer.renew(positions).await
    }

    async fn close(&self) -> Result<(), StoreError> {
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

/// Every record of these tests can be read.
struct NoQuarantine;

#[async_trait]
impl Quarantine for NoQuarantine {
    async fn quarantine(&self, _: &str, poison: &[Poison]) -> Result<(), StoreError> {
        panic!("{poison:?} cannot be read");
    }
}
