use std::collections::BTreeMap;

use tokio::time::Instant;

use super::super::Violation;
use super::super::history::{Digest, Faults};
use super::GroupSummary;

/// What the checker knows of records, deliveries and members.
pub(super) struct Ledger {
    records: BTreeMap<String, Vec<Delivery>>,
    members: BTreeMap<usize, Faults>,
    deliveries: u64,
    pub(super) released: usize,
    digest: Digest,
    violation: Option<Violation>,
}

/// A delivery that is running or succeeded.
struct Delivery {
    number: u64,
    member: usize,
    started: Instant,
    succeeded: bool,
}

impl Ledger {
    pub(super) fn new() -> Self {
        Self {
            records: BTreeMap::new(),
            members: BTreeMap::new(),
            deliveries: 0,
            released: 0,
            digest: Digest::new(),
            violation: None,
        }
    }

    /// The key of the next record.
    pub(super) fn published(&mut self) -> String {
        let key = format!("record {}", self.records.len());
        self.records.insert(key.clone(), Vec::new());
        key
    }

    /// The number of the next member.
    pub(super) fn joined(&mut self) -> usize {
        let member = self.members.len();
        self.members.insert(member, Faults::default());
        member
    }

    pub(super) fn crashed(&mut self, member: usize) {
        self.members.entry(member).or_default().crashed = true;
    }

    pub(super) fn froze(&mut self, member: usize, until: Instant) {
        self.members.entry(member).or_default().freeze(until);
    }

    pub(super) fn delivery_starts(&mut self, member: usize, key: &str) -> u64 {
        self.deliveries += 1;
        let number = self.deliveries;
        self.digest.note(&[member as u64, number]);
        let is_excused = |delivery: &&Delivery| {
            self.members.get(&delivery.member).is_some_and(|member| member.excuse(delivery.started))
        };
        let before = self.records.get(key);
        let repeated = before.and_then(|deliveries| deliveries.iter().find(|delivery| !is_excused(delivery)));
        if before.is_none() {
            self.violation(format!("{key} was delivered and never published"));
        } else if let Some(first) = repeated.map(|delivery| delivery.member) {
            self.violation(format!("{key} was delivered by member {first} and again by member {member}"));
        }
        let delivery = Delivery { number, member, started: Instant::now(), succeeded: false };
        self.records.entry(key.to_owned()).or_default().push(delivery);
        number
    }

    pub(super) fn delivery_ends(&mut self, key: &str, number: u64, succeeded: bool) {
        let Some(deliveries) = self.records.get_mut(key) else { return };
        match succeeded {
            true => deliveries.iter_mut().filter(|of| of.number == number).for_each(|of| of.succeeded = true),
            false => deliveries.retain(|of| of.number != number),
        }
        self.digest.note(&[number, u64::from(succeeded)]);
    }

    pub(super) fn is_all_delivered(&self) -> bool {
        self.records.values().all(|deliveries| deliveries.iter().any(|delivery| delivery.succeeded))
    }

    pub(super) fn check(&self) -> Result<GroupSummary, Violation> {
        if let Some(violation) = &self.violation {
            return Err(violation.clone());
        }
        let mut summary = GroupSummary {
            records: self.records.len(),
            deliveries: self.deliveries as usize,
            crashes: self.members.values().filter(|member| member.crashed).count(),
            released: self.released,
            digest: self.digest.value(),
            ..GroupSummary::default()
        };
        for (key, deliveries) in &self.records {
            let times = deliveries.iter().filter(|delivery| delivery.succeeded).count();
            if times == 0 {
                return Err(Violation::new(format!("{key} is lost")));
            }
            summary.duplicates += times - 1;
        }
        Ok(summary)
    }

    /// Keeps the first violation; later ones are only its consequences.
    fn violation(&mut self, text: String) {
        self.violation.get_or_insert(Violation::new(text));
    }
}
