use std::collections::{BTreeMap, HashMap};
use std::fmt;

use posthaste_core::outbox::{DEAD_AFTER_LOSSES, DeadHead, Mode, OutboxStatus, RowUpdate};
use posthaste_core::{FailureClass, Outcome};
use tokio::time::Instant;

use super::history::{Digest, Faults};
use super::{LEASE, Summary};
use posthaste_testing::MemoryTable;

/// A promise that a run broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(String);

impl Violation {
    pub(super) fn new(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Violation {}

/// What the checker knows from listeners and from the database.
pub(super) struct Ledger {
    events: BTreeMap<i64, EventRecord>,
    by_id: HashMap<String, i64>,
    nodes: BTreeMap<usize, NodeRecord>,
    /// Single node: the fencing token of the table's owner.
    owner: Option<String>,
    deliveries: u64,
    crashes: usize,
    digest: Digest,
    violation: Option<Violation>,
}

/// What the checker knows of one event.
#[derive(Default)]
struct EventRecord {
    key: Option<String>,
    committed: bool,
    /// In modes that lease rows: the claim id of the last claim.
    claim_id: Option<String>,
    /// Ordered: the events of its key that had to be delivered before it, at the time of its last claim.
    must_precede: Vec<i64>,
    /// The deliveries that are in flight or succeeded.
    deliveries: Vec<Delivery>,
    /// The number of deliveries as a suspect that started since an attempt last ended.
    starts: u32,
    /// Failed deliveries that count as attempts.
    failures: u32,
    done: u32,
    went_dead: u32,
    replays: u32,
    discarded: bool,
}

/// How a delivery ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// It succeeded.
    Delivered,
    /// It failed, and the attempt counts.
    Counted,
    /// It was snoozed, failed without counting, or was interrupted.
    Otherwise,
}

impl Ended {
    pub(super) fn with(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Delivered => Self::Delivered,
            Outcome::Failed(failure) if failure.class == FailureClass::Transient => Self::Counted,
            _ => Self::Otherwise,
        }
    }
}

struct Delivery {
    number: u64,
    node: usize,
    started: Instant,
    succeeded: bool,
}

/// What the checker knows of one process.
#[derive(Default)]
struct NodeRecord {
    faults: Faults,
    /// The common prefix of its claim ids.
    claim_prefix: Option<String>,
    /// The name under which it owns the table.
    owner: Option<String>,
}

impl Ledger {
    pub(super) fn new() -> Self {
        Self {
            events: BTreeMap::new(),
            by_id: HashMap::new(),
            nodes: BTreeMap::new(),
            owner: None,
            deliveries: 0,
            crashes: 0,
            digest: Digest::new(),
            violation: None,
        }
    }

    /// Keeps the first violation; later ones are only its consequences.
    pub(super) fn violation(&mut self, text: String) {
        self.violation.get_or_insert(Violation(text));
    }

    fn event(&mut self, seq: i64) -> &mut EventRecord {
        self.events.entry(seq).or_default()
    }

    pub(super) fn crashed(&mut self, node: usize) {
        self.crashes += 1;
        self.nodes.entry(node).or_default().faults.crashed = true;
    }

    pub(super) fn froze(&mut self, node: usize, until: Instant) {
        self.nodes.entry(node).or_default().faults.freeze(until);
    }

    pub(super) fn inserted(&mut self, seq: i64, id: &str, key: Option<&str>, claim_id: Option<&str>) {
        self.by_id.insert(id.to_owned(), seq);
        let event = self.event(seq);
        event.key = key.map(str::to_owned);
        event.claim_id = claim_id.map(str::to_owned);
    }

    pub(super) fn committed(&mut self, seq: i64) {
        self.event(seq).committed = true;
    }

    /// All claim ids of a process begin with the same prefix.
    pub(super) fn note_claim_prefix(&mut self, node: usize, claim_id: &str) {
        let claim_prefix = claim_id.split(':').next().unwrap_or_default();
        self.nodes.entry(node).or_default().claim_prefix.get_or_insert_with(|| claim_prefix.to_owned());
    }

    pub(super) fn claimed(&mut self, seq: i64, claim_id: &str, must_precede: Vec<i64>) {
        let event = self.event(seq);
        event.claim_id = Some(claim_id.to_owned());
        event.must_precede = must_precede;
    }

    /// A suspect is about to be delivered, under a new claim id.
    pub(super) fn started(&mut self, seq: i64, claim_id: &str) {
        let event = self.event(seq);
        event.claim_id = Some(claim_id.to_owned());
        event.starts += 1;
    }

    pub(super) fn owned(&mut self, node: usize, owner: &str, generation: i64) {
        self.nodes.entry(node).or_default().owner = Some(owner.to_owned());
        self.owner = Some(format!("{owner}:{generation}"));
    }

    /// The event lost its lease too often and goes dead. The first loss may have any cause; the others must be
    /// deliveries that did not end.
    pub(super) fn went_dead(&mut self, seq: i64) {
        let event = self.event(seq);
        event.went_dead += 1;
        if std::mem::take(&mut event.starts) < DEAD_AFTER_LOSSES - 1 {
            self.violation(format!(
                "event {seq} went dead for lost leases although its delivery was not started often enough"
            ));
        }
    }

    pub(super) fn replayed(&mut self, seq: i64) {
        self.event(seq).replays += 1;
    }

    pub(super) fn discarded(&mut self, seq: i64) {
        self.event(seq).discarded = true;
    }

    /// The store applied an update that came with these fencing tokens.
    pub(super) fn settled(&mut self, mode: Mode, fencing_tokens: &[String], change: &RowUpdate) {
        let RowUpdate { seq, status, attempts, .. } = *change;
        let owner = self.owner.clone();
        let event = self.event(seq);
        let miscounted = attempts.is_some_and(|attempts| attempts > event.failures);
        let token = if mode.leases_rows() { event.claim_id.take() } else { owner };
        event.starts = 0;
        match status {
            OutboxStatus::Done => event.done += 1,
            OutboxStatus::Dead => event.went_dead += 1,
            _ => {}
        }
        if miscounted {
            self.violation(format!("event {seq} counts an attempt that did not fail"));
        }
        if token.is_none_or(|token| !fencing_tokens.contains(&token)) {
            self.violation(format!("event {seq} was settled without its fencing token"));
        }
    }

    pub(super) fn delivery_starts(
        &mut self,
        node: usize,
        event_id: &str,
        mode: Mode,
        table: &MemoryTable,
        now: i64,
    ) -> u64 {
        self.deliveries += 1;
        let number = self.deliveries;
        let Some(&seq) = self.by_id.get(event_id) else {
            self.violation(format!("event {event_id} was delivered and never written"));
            return number;
        };
        self.digest.note(&[node as u64, seq as u64]);
        if !self.event(seq).committed {
            self.violation(format!("event {seq} was delivered and never committed"));
        }
        if !self.may_deliver(node, seq, mode, table, now) {
            self.violation(format!("event {seq} was delivered by node {node} past its lease"));
        }
        self.check_repetition(node, seq);
        if let Mode::Ordered(dead_head) = mode {
            self.check_order(node, seq, dead_head);
        }
        let delivery = Delivery { number, node, started: Instant::now(), succeeded: false };
        self.event(seq).deliveries.push(delivery);
        number
    }

    /// True if this process may deliver the event now.
    fn may_deliver(&self, node: usize, seq: i64, mode: Mode, table: &MemoryTable, now: i64) -> bool {
        let Some(node) = self.nodes.get(&node) else { return false };
        let Some(row) = table.row(seq).filter(|row| row.is_pending()) else { return false };
        match mode.leases_rows() {
            true => {
                let claim_prefix = row.locked_by.as_ref().and_then(|claim_id| claim_id.split(':').next());
                claim_prefix.is_some()
                    && claim_prefix == node.claim_prefix.as_deref()
                    && now < row.locked_at + LEASE.as_micros() as i64
            }
            false => node.owner.is_some() && table.owner_at(now) == node.owner.as_deref(),
        }
    }

    /// A delivery may be repeated only if its process crashed or was paused.
    fn check_repetition(&mut self, node: usize, seq: i64) {
        let Some(event) = self.events.get(&seq) else { return };
        let unexcused = event.deliveries.iter().find(|delivery| !self.is_excused(delivery));
        if let Some(first) = unexcused.map(|delivery| delivery.node) {
            self.violation(format!("event {seq} was delivered by node {first} and again by node {node}"));
        }
    }

    fn is_excused(&self, delivery: &Delivery) -> bool {
        self.nodes.get(&delivery.node).is_some_and(|node| node.faults.excuse(delivery.started))
    }

    /// All earlier events of the same key must have been delivered, and no other event of the key may be in flight.
    ///
    /// Where dead events are skipped, a replayed event is out of order by definition, and may be in flight with a later
    /// one.
    fn check_order(&mut self, node: usize, seq: i64, dead_head: DeadHead) {
        let Some(event) = self.events.get(&seq) else { return };
        let comes_later = |event: &EventRecord| dead_head == DeadHead::Skip && event.replays > 0;
        let Some(key) = event.key.clone() else { return };
        let delivered = |seq: &i64| {
            let event = self.events.get(seq);
            event.is_some_and(|event| event.deliveries.iter().any(|delivery| delivery.succeeded))
        };
        let missing = event.must_precede.iter().copied().find(|before| !delivered(before));
        let of_key = self.events.iter().filter(|(_, event)| event.key.as_ref() == Some(&key) && !comes_later(event));
        let running = of_key.flat_map(|(seq, event)| event.deliveries.iter().map(move |delivery| (*seq, delivery)));
        let mut running = running.filter(|(_, delivery)| !delivery.succeeded && !self.is_excused(delivery));
        let other = running.next().map(|(seq, delivery)| (seq, delivery.node)).filter(|_| !comes_later(event));
        if let Some(missing) = missing {
            self.violation(format!("event {seq} of {key} was delivered before event {missing}"));
        }
        if let Some((other, by)) = other {
            self.violation(format!("event {seq} of {key} went to node {node} while event {other} was with node {by}"));
        }
    }

    pub(super) fn delivery_ends(&mut self, event_id: &str, number: u64, ended: Ended) {
        let Some(event) = self.by_id.get(event_id).and_then(|seq| self.events.get_mut(seq)) else { return };
        let succeeded = ended == Ended::Delivered;
        event.failures += u32::from(ended == Ended::Counted);
        match succeeded {
            true => event.deliveries.iter_mut().filter(|of| of.number == number).for_each(|of| of.succeeded = true),
            false => event.deliveries.retain(|of| of.number != number),
        }
        self.digest.note(&[number, u64::from(succeeded)]);
    }

    pub(super) fn check(&self, table: &MemoryTable) -> Result<Summary, Violation> {
        if let Some(violation) = &self.violation {
            return Err(violation.clone());
        }
        let committed = self.events.iter().filter(|(_, event)| event.committed);
        let mut summary = Summary {
            deliveries: self.deliveries as usize,
            crashes: self.crashes,
            digest: self.digest.value(),
            ..Summary::default()
        };
        for (seq, event) in committed {
            let EventRecord { done, went_dead, replays, discarded, .. } = event;
            let times = event.deliveries.iter().filter(|delivery| delivery.succeeded).count();
            let is_there = table.row(*seq).is_none_or(|row| row.status == OutboxStatus::Done);
            let is_finished = *discarded || (times > 0 && *done == 1 && is_there);
            if !is_finished {
                return Err(Violation(format!("event {seq} is lost: {done} times done after {times} deliveries")));
            }
            if done + went_dead != 1 + replays {
                return Err(Violation(format!(
                    "event {seq} was done {done} times and dead {went_dead} times with {replays} replays"
                )));
            }
            summary.events += 1;
            summary.discarded += usize::from(*discarded);
            summary.duplicates += times.saturating_sub(1);
        }
        Ok(summary)
    }
}
