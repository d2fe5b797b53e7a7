use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use posthaste_core::{Failure, Outcome};
use tokio::time::Instant;

use super::Sabotage;
use super::checker::{Ledger, Violation};
use crate::memory::MemoryItem;
use crate::{MemoryStatus, MemoryStore};

/// What all nodes of one run share: the store, chance, and the ledger of what was delivered.
#[derive(Clone)]
pub(super) struct World {
    pub(super) store: MemoryStore<usize>,
    inner: Arc<Mutex<Inner>>,
    pub(super) sabotage: Sabotage,
}

struct Inner {
    chance: fastrand::Rng,
    stormy: bool,
    sabotaged: bool,
    ledger: Ledger,
}

/// What goes wrong at one step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// The process dies here.
    Crash,
    /// The process stands still, and wakes up after this time as if nothing had been.
    Freeze(Duration),
    /// The store refuses before it does anything.
    Refuse,
    /// The store does it and the answer is lost.
    LoseAnswer,
}

/// What a subscriber does with a delivery.
pub(super) enum Reaction {
    Answer {
        after: Duration,
        outcome: Outcome,
    },
    Panic,
    /// Dropped without a word.
    Silence,
}

impl World {
    pub(super) fn new(store: MemoryStore<usize>, chance: fastrand::Rng, sabotage: Sabotage) -> Self {
        let inner = Inner { chance, stormy: true, sabotaged: false, ledger: Ledger::default() };
        Self { store, inner: Arc::new(Mutex::new(inner)), sabotage }
    }

    pub(super) fn calm(&self) {
        self.lock().stormy = false;
    }

    /// Draws what happens at a step of a store call.
    pub(super) fn fault(&self) -> Fault {
        let mut inner = self.lock();
        if !inner.stormy {
            return Fault::None;
        }
        let fault = match inner.chance.u32(0..200) {
            0 | 1 => Fault::Crash,
            2 => Fault::Freeze(Duration::from_secs(inner.chance.u64(1..90))),
            3..6 => Fault::Refuse,
            6..8 => Fault::LoseAnswer,
            _ => Fault::None,
        };
        if fault == Fault::Crash {
            inner.ledger.crashes += 1;
        }
        if fault != Fault::None {
            inner.ledger.faults += 1;
        }
        fault
    }

    pub(super) fn reaction(&self) -> Reaction {
        let mut inner = self.lock();
        if !inner.stormy {
            return Reaction::Answer {
                after: Duration::from_millis(inner.chance.u64(0..50)),
                outcome: Outcome::Delivered,
            };
        }
        let after = match inner.chance.u32(0..20) {
            // Slower than a lease: only renewal keeps others away.
            0 => Duration::from_secs(inner.chance.u64(20..70)),
            1..6 => Duration::from_millis(inner.chance.u64(1..3_000)),
            _ => Duration::ZERO,
        };
        let outcome = match inner.chance.u32(0..100) {
            0..8 => Outcome::Failed(Failure::transient("503", "down")),
            8..11 => Outcome::Failed(Failure::outage("broker", "gone")),
            11..14 => Outcome::Snoozed { wait: Duration::from_millis(inner.chance.u64(0..5_000)) },
            14 => Outcome::Failed(Failure::permanent("410", "gone")),
            15 => return Reaction::Panic,
            16 => return Reaction::Silence,
            _ => Outcome::Delivered,
        };
        Reaction::Answer { after, outcome }
    }

    pub(super) fn draw(&self) -> f64 {
        self.lock().chance.f64()
    }

    /// True once per run, for the kind of sabotage that was asked for.
    pub(super) fn sabotage_now(&self, kind: Sabotage) -> bool {
        let mut inner = self.lock();
        let now = self.sabotage == kind && !inner.sabotaged;
        inner.sabotaged |= now;
        now
    }

    pub(super) fn delivery_starts(&self, owner: u64, item: &MemoryItem<usize>) {
        let now = Instant::now();
        let (lawful, key) = self.store.rows(|rows| {
            let row = rows.get(&item.seq);
            let held = row.is_some_and(|row| row.is_held_by(owner, item.claim(), now));
            (held, row.and_then(|row| row.key.clone()))
        });
        let mut inner = self.lock();
        if !lawful {
            inner.ledger.violation(format!("item {} was delivered past its lease", item.seq));
        }
        inner.ledger.deliveries += 1;
        if let Some(key) = key {
            self.check_order(&mut inner.ledger, item.seq, &key);
        }
    }

    /// Everything before it with the same key must have been delivered at least once.
    fn check_order(&self, ledger: &mut Ledger, seq: u64, key: &Arc<str>) {
        let missing = self.store.rows(|rows| {
            let before = rows.range(..seq).filter(|(_, row)| row.key.as_ref() == Some(key));
            before.map(|(seq, _)| *seq).find(|seq| !ledger.delivered.contains_key(seq))
        });
        if let Some(missing) = missing {
            ledger.violation(format!("item {seq} of {key} was delivered before item {missing}"));
        }
    }

    pub(super) fn delivered(&self, seq: u64) {
        self.lock().ledger.delivered.entry(seq).or_default().times += 1;
    }

    /// A delivery that was cut off by a stop: its outcome is unknown, so it may come again.
    pub(super) fn cut_off(&self, seq: u64) {
        self.lock().ledger.delivered_or_cut(seq);
    }

    pub(super) fn applied(&self, seq: u64, terminal: bool, done: bool) {
        self.lock().ledger.applied(seq, terminal, done);
    }

    pub(super) fn replay_dead(&self) {
        let dead: Vec<u64> = self.store.rows(|rows| {
            let dead = rows.iter().filter(|(_, row)| row.status == MemoryStatus::Dead);
            dead.map(|(seq, _)| *seq).collect()
        });
        for seq in dead {
            self.lock().ledger.replayed(seq);
            self.store.replay(seq);
        }
    }

    pub(super) fn all_done(&self) -> bool {
        self.store.rows(|rows| rows.values().all(|row| row.status == MemoryStatus::Done))
    }

    pub(super) fn unfinished(&self) -> Violation {
        let left: BTreeMap<u64, MemoryStatus> = self.store.rows(|rows| {
            let left = rows.iter().filter(|(_, row)| row.status != MemoryStatus::Done);
            left.map(|(seq, row)| (*seq, row.status)).collect()
        });
        Violation::new(format!("an hour of calm and still not done: {left:?}"))
    }

    pub(super) fn check(&self) -> Result<super::Summary, Violation> {
        let inner = self.lock();
        self.store.rows(|rows| inner.ledger.check(rows))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
