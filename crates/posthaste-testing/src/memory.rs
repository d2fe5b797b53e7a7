use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::{Claim, Claimed, Disposition, Failure, Settled, Settlement, Source, StoreError, Wakeup};
use tokio::time::Instant;

/// A table of items in memory that several owners claim from: the whole life of an outbox row, without a database.
///
/// It lives on tokio's clock, so a test that pauses the clock also owns its leases.
pub struct MemoryStore<T> {
    rows: Arc<Mutex<BTreeMap<u64, MemoryRow<T>>>>,
    lease: Duration,
    wakeups: Arc<Mutex<Vec<Wakeup>>>,
    owners: Arc<AtomicU64>,
}

/// One row, as a test may look at it.
#[derive(Clone, Debug)]
pub struct MemoryRow<T> {
    pub item: Arc<T>,
    pub key: Option<Arc<str>>,
    pub status: MemoryStatus,
    pub attempts: u32,
    /// How often a claim of it ended by expiry.
    pub lease_losses: u32,
    pub last_failure: Option<Failure>,
    due: Instant,
    lock: Option<Lock>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryStatus {
    New,
    Done,
    Retry,
    Dead,
}

#[derive(Clone, Copy, Debug)]
struct Lock {
    owner: u64,
    /// Two claims by one owner are two claims.
    claim: u64,
    until: Instant,
}

/// What a [`MemorySource`] hands out.
#[derive(Clone, Debug)]
pub struct MemoryItem<T> {
    pub seq: u64,
    pub item: Arc<T>,
    claim: u64,
}

/// One owner's view of a [`MemoryStore`].
pub struct MemorySource<T> {
    store: MemoryStore<T>,
    owner: u64,
    wakeup: Wakeup,
}

impl<T> Clone for MemoryStore<T> {
    fn clone(&self) -> Self {
        Self { rows: self.rows.clone(), lease: self.lease, wakeups: self.wakeups.clone(), owners: self.owners.clone() }
    }
}

impl<T: Send + Sync + 'static> MemoryStore<T> {
    pub fn new(lease: Duration) -> Self {
        Self { rows: Arc::default(), lease, wakeups: Arc::default(), owners: Arc::new(AtomicU64::new(1)) }
    }

    /// Adds an item and wakes every source; answers its number, which is its place in the order.
    pub fn insert(&self, item: T, key: Option<&str>, delay: Duration) -> u64 {
        let mut rows = self.lock();
        let seq = rows.last_key_value().map_or(0, |(last, _)| last + 1);
        let row = MemoryRow {
            item: Arc::new(item),
            key: key.map(Arc::from),
            status: MemoryStatus::New,
            attempts: 0,
            lease_losses: 0,
            last_failure: None,
            due: Instant::now() + delay,
            lock: None,
        };
        rows.insert(seq, row);
        drop(rows);
        self.wake();
        seq
    }

    /// A new owner: a new process, as far as the store can tell.
    pub fn source(&self) -> MemorySource<T> {
        let wakeup = Wakeup::default();
        self.wakeups.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(wakeup.clone());
        MemorySource { store: self.clone(), owner: self.owners.fetch_add(1, Ordering::Relaxed), wakeup }
    }

    pub fn row(&self, seq: u64) -> Option<MemoryRow<T>>
    where
        T: Clone,
    {
        self.lock().get(&seq).cloned()
    }

    pub fn rows<R>(&self, look: impl FnOnce(&BTreeMap<u64, MemoryRow<T>>) -> R) -> R {
        look(&self.lock())
    }

    /// Makes a dead item new again; whether there was one.
    pub fn replay(&self, seq: u64) -> bool {
        let mut rows = self.lock();
        let Some(row) = rows.get_mut(&seq).filter(|row| row.status == MemoryStatus::Dead) else {
            return false;
        };
        row.status = MemoryStatus::New;
        row.attempts = 0;
        row.due = Instant::now();
        drop(rows);
        self.wake();
        true
    }

    fn wake(&self) {
        self.wakeups.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).iter().for_each(Wakeup::wake);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, MemoryRow<T>>> {
        self.rows.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl<T> MemoryRow<T> {
    fn is_pending(&self) -> bool {
        matches!(self.status, MemoryStatus::New | MemoryStatus::Retry)
    }

    fn is_held(&self, now: Instant) -> bool {
        self.lock.is_some_and(|lock| now < lock.until)
    }

    /// Whether this very claim still holds the row.
    pub fn is_held_by(&self, owner: u64, claim: u64, now: Instant) -> bool {
        self.lock.is_some_and(|lock| lock.owner == owner && lock.claim == claim && now < lock.until)
    }
}

impl<T> MemorySource<T> {
    pub fn owner(&self) -> u64 {
        self.owner
    }
}

impl<T> MemoryItem<T> {
    pub fn claim(&self) -> u64 {
        self.claim
    }
}

/// Pending rows in the order of a claim. A key whose head waits, is dead or is held by somebody is left out whole.
fn claimable<T>(rows: &BTreeMap<u64, MemoryRow<T>>, now: Instant) -> Vec<u64> {
    let mut blocked: HashSet<Arc<str>> = HashSet::new();
    let mut free = Vec::new();
    for (seq, row) in rows.iter().filter(|(_, row)| row.status != MemoryStatus::Done) {
        let ready = row.is_pending() && row.due <= now && !row.is_held(now);
        match &row.key {
            Some(key) if blocked.contains(key) => {}
            Some(key) if !ready => drop(blocked.insert(key.clone())),
            _ if ready => free.push((row.key.is_none().then_some(row.due), *seq)),
            _ => {}
        }
    }
    // Rows of a key stay in insertion order whatever their due times: its head has made them wait.
    free.sort_by_key(|(due, seq)| (due.unwrap_or(now), *seq));
    free.into_iter().map(|(_, seq)| seq).collect()
}

#[async_trait]
impl<T: Send + Sync + 'static> Source for MemorySource<T> {
    type Item = MemoryItem<T>;

    async fn claim(&self, limit: usize) -> Result<Claim<Self::Item>, StoreError> {
        let now = Instant::now();
        let mut rows = self.store.lock();
        let mut chosen = claimable(&rows, now);
        chosen.truncate(limit);
        let claim = self.store.owners.fetch_add(1, Ordering::Relaxed);
        let mut items = Vec::with_capacity(chosen.len());
        for seq in chosen {
            let Some(row) = rows.get_mut(&seq) else { continue };
            row.lease_losses += u32::from(row.lock.is_some());
            row.lock = Some(Lock { owner: self.owner, claim, until: now + self.store.lease });
            let item = MemoryItem { seq, item: row.item.clone(), claim };
            items.push(Claimed { key: row.key.clone(), ..Claimed::new(item, row.attempts + 1, 1) });
        }
        let waiting = rows.values().filter(|row| row.is_pending());
        let next = waiting.map(|row| row.lock.map_or(row.due, |lock| lock.until.max(row.due))).min();
        Ok(Claim { items, next_due: next.map(|due| due.saturating_duration_since(now)) })
    }

    async fn settle(&self, settlements: &[Settlement<'_, Self::Item>]) -> Result<Vec<Settled>, StoreError> {
        let now = Instant::now();
        let mut rows = self.store.lock();
        let settle_one = |settlement: &Settlement<'_, Self::Item>| {
            let item = &settlement.claimed.item;
            let Some(row) = rows.get_mut(&item.seq).filter(|row| row.is_held_by(self.owner, item.claim, now)) else {
                return Settled::LostLease;
            };
            row.lock = None;
            match settlement.disposition {
                Disposition::Done => row.status = MemoryStatus::Done,
                Disposition::Dead(failure) => {
                    row.status = MemoryStatus::Dead;
                    row.last_failure = Some(failure.clone());
                }
                Disposition::Retry { after, counted, failure } => {
                    row.status = if failure.is_some() { MemoryStatus::Retry } else { MemoryStatus::New };
                    row.attempts += u32::from(*counted);
                    // A wait without end is one that no test outlives.
                    row.due = now + (*after).min(Duration::from_secs(100 * 365 * 24 * 60 * 60));
                    row.last_failure = failure.clone();
                }
            }
            Settled::Applied
        };
        Ok(settlements.iter().map(settle_one).collect())
    }

    async fn renew(&self, held: &[&Claimed<Self::Item>]) -> Result<Vec<Settled>, StoreError> {
        let now = Instant::now();
        let mut rows = self.store.lock();
        let renew_one = |claimed: &&Claimed<Self::Item>| {
            let item = &claimed.item;
            match rows.get_mut(&item.seq).filter(|row| row.is_held_by(self.owner, item.claim, now)) {
                Some(row) => {
                    row.lock = row.lock.map(|lock| Lock { until: now + self.store.lease, ..lock });
                    Settled::Applied
                }
                None => Settled::LostLease,
            }
        };
        Ok(held.iter().map(renew_one).collect())
    }

    async fn release(&self, held: &[&Claimed<Self::Item>]) -> Result<(), StoreError> {
        let now = Instant::now();
        let mut rows = self.store.lock();
        for claimed in held {
            let item = &claimed.item;
            if let Some(row) = rows.get_mut(&item.seq).filter(|row| row.is_held_by(self.owner, item.claim, now)) {
                row.lock = None;
            }
        }
        drop(rows);
        self.store.wake();
        Ok(())
    }

    async fn close(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn lease(&self) -> Duration {
        self.store.lease
    }

    fn wakeup(&self) -> &Wakeup {
        &self.wakeup
    }
}
