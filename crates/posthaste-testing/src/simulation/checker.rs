use std::collections::BTreeMap;
use std::fmt;

use super::Summary;
use crate::{MemoryRow, MemoryStatus};

/// A promise that was not kept.
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

/// What was seen at the subscriber and at the store.
#[derive(Default)]
pub(super) struct Ledger {
    pub(super) deliveries: usize,
    pub(super) crashes: usize,
    pub(super) faults: usize,
    pub(super) delivered: BTreeMap<u64, Delivered>,
    settled: BTreeMap<u64, Settlements>,
    violation: Option<Violation>,
}

#[derive(Default)]
pub(super) struct Delivered {
    pub(super) times: u32,
    /// Deliveries whose outcome a stop cut off.
    cut_off: u32,
}

#[derive(Default)]
struct Settlements {
    terminal: u32,
    done: u32,
    replays: u32,
}

impl Ledger {
    /// Keeps the first: what follows from it is only noise.
    pub(super) fn violation(&mut self, text: String) {
        self.violation.get_or_insert(Violation(text));
    }

    pub(super) fn delivered_or_cut(&mut self, seq: u64) {
        self.delivered.entry(seq).or_default().cut_off += 1;
    }

    pub(super) fn applied(&mut self, seq: u64, terminal: bool, done: bool) {
        let settled = self.settled.entry(seq).or_default();
        settled.terminal += u32::from(terminal);
        settled.done += u32::from(done);
    }

    pub(super) fn replayed(&mut self, seq: u64) {
        self.settled.entry(seq).or_default().replays += 1;
    }

    pub(super) fn check(&self, rows: &BTreeMap<u64, MemoryRow<usize>>) -> Result<Summary, Violation> {
        if let Some(violation) = &self.violation {
            return Err(violation.clone());
        }
        let mut duplicates = 0;
        for (seq, row) in rows {
            let times = self.delivered.get(seq).map_or(0, |delivered| delivered.times);
            let cut_off = self.delivered.get(seq).map_or(0, |delivered| delivered.cut_off);
            if row.status != MemoryStatus::Done || times == 0 {
                return Err(Violation(format!("item {seq} is lost: {:?} after {times} deliveries", row.status)));
            }
            // Only a claim that ended by expiry, or a delivery that a stop cut off, excuses one delivery more.
            if times > 1 + row.lease_losses + cut_off {
                return Err(Violation(format!(
                    "item {seq} was delivered {times} times with {} lost leases and {cut_off} cut off",
                    row.lease_losses
                )));
            }
            let settled = self.settled.get(seq);
            let (terminal, done, replays) = settled.map_or((0, 0, 0), |s| (s.terminal, s.done, s.replays));
            if done != 1 || terminal != 1 + replays {
                return Err(Violation(format!(
                    "item {seq} was settled as done {done} times, in all {terminal} times with {replays} replays"
                )));
            }
            duplicates += times as usize - 1;
        }
        if self.faults == 0 && duplicates > 0 {
            return Err(Violation(format!("{duplicates} duplicates although nothing went wrong")));
        }
        Ok(Summary { items: rows.len(), deliveries: self.deliveries, crashes: self.crashes, duplicates })
    }
}
