use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::bus::{Bus, Consumer, Fetched, Poison, Position, Quarantine, Record, Topics};
use posthaste_core::{Progress, Settled, StoreError, Wakeup, lock};
use tokio::time::Instant;

type Partition = (Arc<str>, u32);

/// An in-memory bus that keeps the same laws as the real ones. Clones share one log.
#[derive(Clone)]
pub struct MemoryBus {
    store: Arc<Mutex<Store>>,
    partitions: u32,
    lease: Duration,
}

#[derive(Default)]
struct Store {
    topics: BTreeMap<Arc<str>, Vec<Vec<Record>>>,
    shares: HashMap<(String, Partition), Share>,
    members: u64,
    wakeups: Vec<Wakeup>,
    quarantined: Vec<(String, Poison)>,
}

/// One group's state in one partition.
#[derive(Default)]
struct Share {
    progress: Progress,
    owner: Option<u64>,
    generation: i64,
    leased_until: Option<Instant>,
    /// The lowest offset that was not fetched in this generation.
    next: i64,
}

impl MemoryBus {
    /// A bus whose topics have this many partitions and whose leases last this long.
    pub fn new(partitions: u32, lease: Duration) -> Self {
        Self { store: Arc::default(), partitions: partitions.max(1), lease }
    }

    /// Everything published to this topic, partition by partition.
    pub fn records(&self, topic: &str) -> Vec<Record> {
        lock(&self.store).topics.get(topic).map(|partitions| partitions.concat()).unwrap_or_default()
    }

    /// The quarantined records, each with the group that quarantined it.
    pub fn quarantined(&self) -> Vec<(String, Poison)> {
        lock(&self.store).quarantined.clone()
    }
}

#[async_trait]
impl Bus for MemoryBus {
    async fn publish(&self, records: Vec<Record>) -> Vec<Result<(), Arc<StoreError>>> {
        let mut store = lock(&self.store);
        let answers = vec![Ok(()); records.len()];
        for record in records {
            let made = || vec![Vec::new(); self.partitions as usize];
            let partitions = store.topics.entry(Arc::clone(&record.topic)).or_insert_with(made);
            let chosen = (record.route % partitions.len() as u64) as usize;
            partitions[chosen].push(record);
        }
        store.wakeups.iter().for_each(Wakeup::wake);
        answers
    }

    async fn subscribe(&self, group: &str, topics: Topics) -> Result<Box<dyn Consumer>, StoreError> {
        let wakeup = Wakeup::default();
        let mut store = lock(&self.store);
        store.members += 1;
        store.wakeups.push(wakeup.clone());
        let (bus, group) = (self.clone(), group.to_owned());
        Ok(Box::new(Member { bus, group, topics, owner: store.members, wakeup, closed: Mutex::new(false) }))
    }
}

#[async_trait]
impl Quarantine for MemoryBus {
    async fn quarantine(&self, group: &str, poison: &[Poison]) -> Result<(), StoreError> {
        let place = |position: &Position| (Arc::clone(&position.topic), position.partition, position.offset);
        let mut store = lock(&self.store);
        for poison in poison {
            let request = place(&poison.record.position);
            let known = |(by, kept): &(String, Poison)| by == group && place(&kept.record.position) == request;
            if !store.quarantined.iter().any(known) {
                store.quarantined.push((group.to_owned(), poison.clone()));
            }
        }
        Ok(())
    }
}

struct Member {
    bus: MemoryBus,
    group: String,
    topics: Topics,
    owner: u64,
    wakeup: Wakeup,
    closed: Mutex<bool>,
}

impl Member {
    fn reads(&self, topic: &str) -> bool {
        match &self.topics {
            Topics::Named(names) => names.iter().any(|name| name == topic),
            Topics::Prefix(prefix) => topic.starts_with(prefix.as_str()),
        }
    }

    /// Leases all partitions that this member owns or that are free.
    fn claim_partitions(&self, store: &mut Store) {
        let now = Instant::now();
        if *lock(&self.closed) {
            return;
        }
        for (topic, partitions) in store.topics.iter().filter(|(topic, _)| self.reads(topic)) {
            for number in 0..partitions.len() as u32 {
                let key = (self.group.clone(), (Arc::clone(topic), number));
                let share = store.shares.entry(key).or_default();
                let is_free = share.leased_until.is_none_or(|until| until < now);
                if share.owner != Some(self.owner) && is_free {
                    share.owner = Some(self.owner);
                    share.generation += 1;
                    share.next = share.progress.watermark();
                }
                if share.owner == Some(self.owner) {
                    share.leased_until = Some(now + self.bus.lease);
                }
            }
        }
    }

    /// The share of this position, if this member still owns it in the generation in which the position was fetched.
    fn share<'a>(&self, store: &'a mut Store, position: &Position) -> Option<&'a mut Share> {
        let key = (self.group.clone(), (Arc::clone(&position.topic), position.partition));
        let share = store.shares.get_mut(&key)?;
        (share.owner == Some(self.owner) && share.generation == position.generation).then_some(share)
    }
}

#[async_trait]
impl Consumer for Member {
    async fn fetch(&self, limit: usize) -> Result<Vec<Fetched>, StoreError> {
        let mut store = lock(&self.bus.store);
        self.claim_partitions(&mut store);
        let Store { topics, shares, .. } = &mut *store;
        let mut fetched = Vec::new();
        for ((group, (topic, partition)), share) in shares {
            if *group != self.group || share.owner != Some(self.owner) || !self.reads(topic) {
                continue;
            }
            let records = &topics[topic][*partition as usize];
            while let Some(record) = records.get(share.next as usize).filter(|_| fetched.len() < limit) {
                let offset = share.next;
                share.next += 1;
                if !share.progress.is_done(offset) {
                    let (topic, partition, generation) = (Arc::clone(topic), *partition, share.generation);
                    let position = Position { topic, partition, offset, generation };
                    let Record { key, value, headers, .. } = record.clone();
                    fetched.push(Fetched { position, key, value, headers, damage: None });
                }
            }
        }
        Ok(fetched)
    }

    async fn ack(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        let mut store = lock(&self.bus.store);
        let ack = |position: &&Position| match self.share(&mut store, position) {
            Some(share) => {
                share.progress.complete(position.offset);
                Settled::Applied
            }
            None => Settled::LostLease,
        };
        Ok(positions.iter().map(ack).collect())
    }

    async fn renew(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        let mut store = lock(&self.bus.store);
        self.claim_partitions(&mut store);
        let renew = |position: &&Position| match self.share(&mut store, position) {
            Some(_) => Settled::Applied,
            None => Settled::LostLease,
        };
        Ok(positions.iter().map(renew).collect())
    }

    async fn close(&self) -> Result<(), StoreError> {
        *lock(&self.closed) = true;
        let mut store = lock(&self.bus.store);
        for share in store.shares.values_mut().filter(|share| share.owner == Some(self.owner)) {
            share.owner = None;
            share.leased_until = None;
        }
        store.wakeups.iter().for_each(Wakeup::wake);
        Ok(())
    }

    fn lease(&self) -> Duration {
        self.bus.lease
    }

    fn wakeup(&self) -> &Wakeup {
        &self.wakeup
    }
}
