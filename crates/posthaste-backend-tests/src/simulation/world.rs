use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use posthaste_core::outbox::{Mode, OutboxStatus};
use posthaste_core::{Failure, Outcome, lock};
use tokio::time::Instant;

use super::checker::{Ended, Ledger, Violation};
use super::{Sabotage, Summary, TABLE};
use posthaste_testing::MemoryDatabase;

/// The state that all nodes of one run share: the database, the random generator, and the ledger of deliveries.
#[derive(Clone)]
pub(super) struct World {
    pub(super) database: MemoryDatabase,
    pub(super) mode: Mode,
    pub(super) sabotage: Sabotage,
    /// True if every step is printed.
    is_traced: bool,
    began: Instant,
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    chance: fastrand::Rng,
    weather: Weather,
    stormy: bool,
    sabotaged: bool,
    ledger: Ledger,
    last_number: usize,
    /// The transactions that may still commit: the node of each, and the keys that no other transaction may write
    /// meanwhile.
    writers: BTreeMap<usize, (usize, Vec<String>)>,
}

/// A fault at one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// The process crashes here.
    Crash,
    /// The process is paused for this time and then continues.
    Freeze(Duration),
    /// The store refuses the statement and changes nothing.
    Refuse,
    /// The store executes the statement and the answer is lost.
    LoseAnswer,
}

/// The frequency of each fault in one run, per thousand steps. It differs from run to run.
struct Weather {
    steps: [(Fault, u32); 4],
    /// In addition, per thousand claims: the database leases rows and the answer is lost.
    lost_claims: u32,
    /// In addition, per thousand renewals: the renewal fails.
    failed_renewals: u32,
}

impl Weather {
    fn draw(chance: &mut fastrand::Rng, sabotage: Sabotage) -> Self {
        // Only a process that was paused settles rows whose lease it lost.
        let freezes = if sabotage == Sabotage::IgnoreFence { 40 } else { chance.u32(0..10) };
        let steps = [
            (Fault::Crash, chance.u32(0..8)),
            (Fault::Freeze(Duration::ZERO), freezes),
            (Fault::Refuse, chance.u32(0..30)),
            (Fault::LoseAnswer, chance.u32(0..30)),
        ];
        Self { steps, lost_claims: chance.u32(0..200), failed_renewals: chance.u32(0..400) }
    }
}

/// The reaction of a listener to an event.
pub(super) enum Reaction {
    Answer { after: Duration, outcome: Outcome },
    Panic,
}

impl World {
    pub(super) fn new(database: MemoryDatabase, mode: Mode, mut chance: fastrand::Rng, sabotage: Sabotage) -> Self {
        let inner = Inner {
            weather: Weather::draw(&mut chance, sabotage),
            chance,
            stormy: true,
            sabotaged: false,
            ledger: Ledger::new(),
            last_number: 0,
            writers: BTreeMap::new(),
        };
        let is_traced = std::env::var_os("POSTHASTE_TRACE").is_some();
        Self { database, mode, sabotage, is_traced, began: Instant::now(), inner: Arc::new(Mutex::new(inner)) }
    }

    /// Prints a step of a process if `POSTHASTE_TRACE` is set.
    pub(super) fn trace(&self, node: usize, step: impl FnOnce() -> String) {
        if self.is_traced {
            println!("{:>9.3} node {node}: {}", self.began.elapsed().as_secs_f64(), step());
        }
    }

    pub(super) fn calm(&self) {
        self.lock().stormy = false;
    }

    /// A number that is unique in this run.
    pub(super) fn next_number(&self) -> usize {
        let mut inner = self.lock();
        inner.last_number += 1;
        inner.last_number
    }

    /// Draws at random; true if the answer to a claim is lost.
    pub(super) fn claim_is_lost(&self) -> bool {
        self.strikes(|weather| weather.lost_claims)
    }

    /// Draws at random; true if a renewal fails.
    pub(super) fn renewal_fails(&self) -> bool {
        self.strikes(|weather| weather.failed_renewals)
    }

    fn strikes(&self, per_mille: impl Fn(&Weather) -> u32) -> bool {
        let mut inner = self.lock();
        inner.stormy && inner.chance.u32(0..1_000) < per_mille(&inner.weather)
    }

    /// Draws the fault of one step of a statement.
    pub(super) fn fault(&self) -> Fault {
        let mut inner = self.lock();
        if !inner.stormy {
            return Fault::None;
        }
        let mut drawn = inner.chance.u32(0..1_000);
        let freeze = Duration::from_secs(inner.chance.u64(1..90));
        for (fault, per_mille) in inner.weather.steps {
            if drawn < per_mille {
                return if matches!(fault, Fault::Freeze(_)) { Fault::Freeze(freeze) } else { fault };
            }
            drawn -= per_mille;
        }
        Fault::None
    }

    /// Draws the latency of a statement.
    pub(super) fn latency(&self) -> Option<Duration> {
        let mut inner = self.lock();
        match inner.chance.u32(0..10) {
            0 => Some(Duration::from_millis(inner.chance.u64(1..200))),
            1..4 => Some(Duration::from_millis(inner.chance.u64(1..5))),
            _ => None,
        }
    }

    pub(super) fn reaction(&self) -> Reaction {
        let mut inner = self.lock();
        if !inner.stormy {
            let after = Duration::from_millis(inner.chance.u64(0..50));
            return Reaction::Answer { after, outcome: Outcome::Delivered };
        }
        let after = match inner.chance.u32(0..20) {
            // Longer than a lease: only renewals keep the lease.
            0 => Duration::from_secs(inner.chance.u64(20..70)),
            1..6 => Duration::from_millis(inner.chance.u64(1..3_000)),
            _ => Duration::ZERO,
        };
        let outcome = match inner.chance.u32(0..100) {
            0..8 => Outcome::Failed(Failure::transient("503", "down")),
            8..11 => Outcome::Failed(Failure::outage("broker", "gone")),
            11..14 => Outcome::Snoozed { wait: Duration::from_millis(inner.chance.u64(0..5_000)) },
            14..17 => Outcome::Failed(Failure::permanent("410", "gone")),
            17 => return Reaction::Panic,
            _ => Outcome::Delivered,
        };
        Reaction::Answer { after, outcome }
    }

    pub(super) fn draw(&self) -> f64 {
        self.lock().chance.f64()
    }

    /// True once per run, if the run has this kind of sabotage.
    pub(super) fn sabotage_now(&self, kind: Sabotage) -> bool {
        let mut inner = self.lock();
        let now = self.sabotage == kind && !inner.sabotaged;
        inner.sabotaged |= now;
        now
    }

    pub(super) fn ledger<R>(&self, tell: impl FnOnce(&mut Ledger) -> R) -> R {
        tell(&mut self.lock().ledger)
    }

    pub(super) fn delivery_starts(&self, node: usize, event_id: &str) -> u64 {
        let now = self.database.now();
        let started = self
            .database
            .look(TABLE, |table| self.ledger(|ledger| ledger.delivery_starts(node, event_id, self.mode, table, now)));
        started.unwrap_or_default()
    }

    /// A process crashed: its transactions will never commit.
    pub(super) fn crashed(&self, node: usize) {
        let mut inner = self.lock();
        inner.ledger.crashed(node);
        inner.writers.retain(|_, (of, _)| *of != node);
    }

    /// Begins a transaction that writes events of these keys, except for keys that another open transaction writes. Two
    /// transactions that write the same key at once commit in any order, and a relay cannot repair that.
    pub(super) fn start_writing(&self, node: usize, keys: &mut [Option<String>]) -> Writing {
        let number = self.next_number();
        let mut inner = self.lock();
        for key in keys.iter_mut() {
            let in_use = inner.writers.values().any(|(_, in_use)| key.as_ref().is_some_and(|key| in_use.contains(key)));
            key.take_if(|_| in_use);
        }
        let in_use = keys.iter().flatten().cloned().collect();
        inner.writers.insert(number, (node, in_use));
        drop(inner);
        Writing { world: self.clone(), number }
    }

    /// A commit of events of these keys was sent, and arrives even if its caller stops waiting.
    pub(super) fn start_committing(&self, node: usize, keys: Vec<String>) -> Writing {
        let number = self.next_number();
        self.lock().writers.insert(number, (node, keys));
        Writing { world: self.clone(), number }
    }

    /// True if no transaction is open and every event is done.
    pub(super) fn is_all_done(&self) -> bool {
        let is_done = self.database.look(TABLE, |table| table.rows().all(|row| row.status == OutboxStatus::Done));
        self.lock().writers.is_empty() && is_done.unwrap_or(true)
    }

    pub(super) fn unfinished(&self) -> Violation {
        let rows = self.database.rows(TABLE);
        let left = rows.into_iter().filter(|row| row.status != OutboxStatus::Done);
        let left: Vec<_> = left.map(|row| (row.seq, row.status, row.locked_by, row.last_error)).collect();
        let writers = self.lock().writers.len();
        Violation::new(format!(
            "after an hour of calm {writers} transactions are open and these rows are not done: {left:?}"
        ))
    }

    pub(super) fn check(&self) -> Result<Summary, Violation> {
        let checked = self.database.look(TABLE, |table| self.ledger(|ledger| ledger.check(table)));
        checked.unwrap_or_else(|| Err(Violation::new("no outbox opened the table".to_owned())))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }
}

/// An open transaction.
pub(super) struct Writing {
    world: World,
    number: usize,
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.world.lock().writers.remove(&self.number);
    }
}

/// Notes the end of a delivery in the ledger when dropped.
pub(super) struct Delivering {
    world: World,
    event_id: String,
    number: u64,
    pub(super) ended: Ended,
}

impl Delivering {
    pub(super) fn start(world: &World, node: usize, event_id: &str) -> Self {
        let number = world.delivery_starts(node, event_id);
        world.trace(node, || format!("delivery {number} of {event_id}"));
        Self { world: world.clone(), event_id: event_id.to_owned(), number, ended: Ended::Otherwise }
    }
}

impl Drop for Delivering {
    fn drop(&mut self) {
        self.world.trace(0, || format!("end of delivery {}: {:?}", self.number, self.ended));
        self.world.ledger(|ledger| ledger.delivery_ends(&self.event_id, self.number, self.ended));
    }
}

/// The state of a process. A crashed process takes no further step.
pub(super) struct Life {
    world: World,
    pub(super) node: usize,
    state: Mutex<LifeState>,
    pub(super) crashed: tokio::sync::Notify,
}

#[derive(Default)]
struct LifeState {
    crashed: bool,
    frozen_until: Option<Instant>,
}

impl Life {
    pub(super) fn new(world: &World) -> Self {
        Self {
            world: world.clone(),
            node: world.next_number(),
            state: Mutex::default(),
            crashed: tokio::sync::Notify::new(),
        }
    }

    pub(super) fn has_crashed(&self) -> bool {
        self.lock().crashed
    }

    /// One step of the process: waits while the process is frozen, and for ever if it has crashed.
    pub(super) async fn step(&self) {
        loop {
            let frozen_until = {
                let state = self.lock();
                match state.crashed {
                    true => None,
                    false => Some(state.frozen_until.filter(|until| Instant::now() < *until)),
                }
            };
            match frozen_until {
                None => std::future::pending().await,
                Some(Some(until)) => tokio::time::sleep_until(until).await,
                Some(None) => return,
            }
        }
    }

    pub(super) async fn suffer(&self, fault: Fault) {
        if fault != Fault::None {
            self.world.trace(self.node, || format!("{fault:?}"));
        }
        match fault {
            Fault::Crash => self.crash(),
            Fault::Freeze(time) => {
                let until = Instant::now() + time;
                self.lock().frozen_until = Some(until);
                self.world.ledger(|ledger| ledger.froze(self.node, until));
            }
            Fault::None | Fault::Refuse | Fault::LoseAnswer => {}
        }
        self.step().await;
    }

    pub(super) fn crash(&self) {
        if !std::mem::replace(&mut self.lock().crashed, true) {
            self.world.crashed(self.node);
            self.crashed.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, LifeState> {
        lock(&self.state)
    }
}
