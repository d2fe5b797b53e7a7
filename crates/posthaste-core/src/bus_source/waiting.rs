use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::BusItem;
use crate::relay::LONGEST_WAIT;
use crate::{Claimed, Load};

/// The waiting records of one key may use one part in this many of what is left of the limit.
const PART: usize = 8;

/// Records that are due again later, the earliest on top.
pub(super) struct Waiting<T> {
    heap: BinaryHeap<Reverse<Due<T>>>,
    next_number: u64,
    limit: Load,
    loads: Loads,
}

/// How much waits in memory: of each key, and of all.
#[derive(Clone, Default)]
struct Loads {
    by_key: HashMap<Arc<str>, Load>,
    all: Load,
}

struct Due<T> {
    at: Instant,
    /// Records that are due at the same time keep their order of arrival.
    number: u64,
    claimed: Claimed<BusItem<T>>,
}

impl<T> Ord for Due<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl<T> PartialOrd for Due<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> PartialEq for Due<T> {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl<T> Eq for Due<T> {}

impl Loads {
    fn add(&mut self, key: Option<&Arc<str>>, bytes: usize) {
        self.all += Load::one(bytes);
        if let Some(key) = key {
            *self.by_key.entry(key.clone()).or_default() += Load::one(bytes);
        }
    }

    fn remove(&mut self, key: Option<&Arc<str>>, bytes: usize) {
        self.all -= Load::one(bytes);
        if let Some(load) = key.and_then(|key| self.by_key.get_mut(key)) {
            *load -= Load::one(bytes);
            if load.items == 0 {
                key.and_then(|key| self.by_key.remove(key));
            }
        }
    }
}

/// Decides which retries may wait in memory. One key cannot use the room of the others.
pub(super) struct Shares {
    limit: Load,
    loads: Loads,
}

impl Shares {
    /// True if another record of this key may wait. It then counts.
    pub(super) fn admit<T>(&mut self, claimed: &Claimed<BusItem<T>>) -> bool {
        let key = claimed.item.fair_key.as_ref();
        let left = self.limit.saturating_sub(self.loads.all);
        let mut load = key.and_then(|key| self.loads.by_key.get(key)).copied().unwrap_or_default();
        let share = if load.items == 0 { left } else { left.part(PART) };
        load += Load::one(claimed.bytes);
        let is_admitted = load.is_within(share);
        if is_admitted {
            self.loads.add(key, claimed.bytes);
        }
        is_admitted
    }
}

impl<T> Waiting<T> {
    pub(super) fn new(limit: Load) -> Self {
        Self { heap: BinaryHeap::new(), next_number: 0, limit, loads: Loads::default() }
    }

    /// True if there is room for more.
    pub(super) fn has_room(&self) -> bool {
        self.loads.all.items < self.limit.items && self.loads.all.bytes < self.limit.bytes
    }

    pub(super) fn shares(&self) -> Shares {
        Shares { limit: self.limit, loads: self.loads.clone() }
    }

    pub(super) fn put(&mut self, wait: Duration, claimed: Claimed<BusItem<T>>) {
        self.next_number += 1;
        self.loads.add(claimed.item.fair_key.as_ref(), claimed.bytes);
        let at = Instant::now() + wait.min(LONGEST_WAIT);
        self.heap.push(Reverse(Due { at, number: self.next_number, claimed }));
    }

    pub(super) fn take_due(&mut self, now: Instant, limit: usize) -> Vec<Claimed<BusItem<T>>> {
        let mut due = Vec::new();
        while due.len() < limit && self.heap.peek().is_some_and(|Reverse(next)| next.at <= now) {
            let Some(Reverse(Due { claimed, .. })) = self.heap.pop() else { break };
            self.loads.remove(claimed.item.fair_key.as_ref(), claimed.bytes);
            due.push(claimed);
        }
        due
    }

    /// Removes the revoked records.
    pub(super) fn take_revoked(&mut self, is_revoked: impl Fn(&BusItem<T>) -> bool) -> Vec<Claimed<BusItem<T>>> {
        let (revoked, kept): (Vec<_>, Vec<_>) =
            self.heap.drain().partition(|Reverse(due)| is_revoked(&due.claimed.item));
        self.heap = kept.into();
        let revoked: Vec<_> = revoked.into_iter().map(|Reverse(due)| due.claimed).collect();
        revoked.iter().for_each(|claimed| self.loads.remove(claimed.item.fair_key.as_ref(), claimed.bytes));
        revoked
    }

    /// How long until the next record is due.
    pub(super) fn next_due(&self) -> Option<Duration> {
        self.heap.peek().map(|Reverse(next)| next.at.saturating_duration_since(Instant::now()))
    }
}
