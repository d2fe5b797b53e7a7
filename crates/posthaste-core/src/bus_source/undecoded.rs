use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::bus::{Fetched, Position};
use crate::{Backoff, Load, StoreError};

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Records that are fetched and not decoded: new ones, and before them those whose decoding was postponed because of an
/// outage. The consumer hands out each record only once, so none may be lost here.
pub(super) struct Undecoded {
    records: VecDeque<Fetched>,
    load: Load,
    /// How many records at the front are postponed.
    postponed: usize,
    /// When the postponed records are decoded again.
    retry_at: Option<Instant>,
    backoff: Backoff,
}

impl Default for Undecoded {
    fn default() -> Self {
        Self {
            records: VecDeque::new(),
            load: Load::default(),
            postponed: 0,
            retry_at: None,
            backoff: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
        }
    }
}

impl Undecoded {
    /// The load of all records.
    pub(super) fn load(&self) -> Load {
        self.load
    }

    /// True if every record that is not postponed is decoded.
    pub(super) fn is_decoded(&self) -> bool {
        self.records.len() == self.postponed
    }

    pub(super) fn push(&mut self, records: Vec<Fetched>) {
        records.iter().for_each(|record| self.load += Load::one(record.size()));
        self.records.extend(records);
    }

    /// The next record to decode.
    pub(super) fn next(&self) -> Option<&Fetched> {
        self.records.get(self.postponed)
    }

    /// Removes the record that [`next`](Self::next) returned.
    pub(super) fn take(&mut self) -> Option<Fetched> {
        let record = self.records.remove(self.postponed)?;
        self.load -= Load::one(record.size());
        Some(record)
    }

    /// Postpones the record that [`next`](Self::next) returned.
    pub(super) fn postpone(&mut self, group: &str, error: &StoreError) {
        self.postponed += 1;
        if self.retry_at.is_none() {
            tracing::warn!(
                group,
                error = error.chain(),
                "failed to decode a record: it waits, and the records behind it are delivered meanwhile"
            );
            self.retry_at = Some(Instant::now() + self.backoff.next_pause());
        }
    }

    /// How long until the postponed records are decoded again.
    pub(super) fn next_try(&self) -> Option<Duration> {
        self.retry_at.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// If it is time, makes the postponed records the next ones to decode and returns true.
    pub(super) fn retry_postponed(&mut self, now: Instant) -> bool {
        if self.retry_at.is_none_or(|at| at > now) {
            if self.retry_at.is_none() {
                self.backoff.reset();
            }
            return false;
        }
        (self.retry_at, self.postponed) = (None, 0);
        true
    }

    /// Removes the revoked records.
    pub(super) fn take_revoked(&mut self, is_revoked: impl Fn(&Position) -> bool) -> Vec<Fetched> {
        let mut revoked = Vec::new();
        let mut index = 0;
        while let Some(record) = self.records.get(index) {
            if !is_revoked(&record.position) {
                index += 1;
                continue;
            }
            self.postponed -= usize::from(index < self.postponed);
            if let Some(record) = self.records.remove(index) {
                self.load -= Load::one(record.size());
                revoked.push(record);
            }
        }
        revoked
    }
}
