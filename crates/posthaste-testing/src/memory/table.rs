use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use posthaste_core::outbox::{Mode, OutboxRow, OutboxStatus, Owner, Position, Registration, RowUpdate};
use posthaste_core::{Delay, Event, Wakeup};

use super::{date, in_micros};

/// One outbox table. All times are microseconds of the database's clock.
#[derive(Default)]
#[doc(hidden)]
pub struct MemoryTable {
    rows: BTreeMap<i64, Row>,
    /// The pending rows in the order of delivery.
    pub(super) pending: BTreeSet<Position>,
    /// By key, the rows that are pending or DEAD, in the order of insertion.
    pub(super) by_key: BTreeMap<Arc<str>, BTreeSet<i64>>,
    by_id: HashMap<String, i64>,
    last_seq: i64,
    pub(super) registration: Option<Registration>,
    owner: Option<String>,
    generation: i64,
    owned_until: i64,
    /// The wakeups that a notification signals, by the number of their listener.
    pub(super) listeners: BTreeMap<u64, Wakeup>,
    pub(super) last_listener: u64,
}

/// One row of the table.
#[derive(Clone, Debug)]
#[doc(hidden)]
#[allow(missing_docs)]
pub struct Row {
    pub seq: i64,
    pub event: Arc<Event>,
    /// The ordering key; a row with `None` is unordered.
    pub key: Option<Arc<str>>,
    pub status: OutboxStatus,
    pub(super) attempts: u32,
    pub(super) available_at: i64,
    pub(super) created_at: i64,
    pub(super) done_at: Option<i64>,
    pub(super) last_error: Option<String>,
    pub locked_by: Option<String>,
    pub locked_at: i64,
    pub(super) lease_losses: u32,
    /// True if the row can be decoded as an event.
    pub(super) is_readable: bool,
}

#[doc(hidden)]
#[allow(missing_docs)]
impl Row {
    pub(super) fn new(seq: i64, event: &Event, claim_id: Option<&str>, now: i64) -> Self {
        // The length marks the end of the type, whatever characters the type contains.
        let aggregate_type = event.aggregate_type();
        let key = event.aggregate_id().map(|id| format!("{}:{aggregate_type}:{id}", aggregate_type.len()).into());
        let available_at = match event.delay() {
            Delay::None => now,
            Delay::Until(at) => at.timestamp_micros(),
            Delay::For(wait) => now + in_micros(wait),
        };
        Self {
            seq,
            event: Arc::new(event.clone()),
            key,
            status: OutboxStatus::New,
            attempts: 0,
            available_at,
            created_at: now,
            done_at: None,
            last_error: None,
            locked_by: claim_id.map(str::to_owned),
            locked_at: now,
            lease_losses: 0,
            is_readable: true,
        }
    }

    pub fn is_pending(&self) -> bool {
        matches!(self.status, OutboxStatus::New | OutboxStatus::Retry)
    }

    pub(super) fn position(&self) -> Position {
        Position { due: self.available_at, seq: self.seq }
    }

    pub(super) fn is_claimed_by(&self, claim_ids: &[String]) -> bool {
        self.locked_by.as_ref().is_some_and(|claim_id| claim_ids.contains(claim_id))
    }

    pub(super) fn finish(&mut self, status: OutboxStatus, now: i64) {
        self.status = status;
        self.done_at = Some(now);
        self.locked_by = None;
    }

    pub(super) fn as_seen(&self) -> OutboxRow {
        OutboxRow {
            seq: self.seq,
            event_id: self.event.id().to_owned(),
            event: self.is_readable.then(|| Event::clone(&self.event)),
            status: self.status,
            attempts: self.attempts,
            available_at: date(self.available_at),
            created_at: date(self.created_at),
            done_at: self.done_at.map(date),
            last_error: self.last_error.clone(),
            locked_by: self.locked_by.clone(),
            locked_at: self.locked_by.as_ref().map(|_| date(self.locked_at)),
            lease_losses: self.lease_losses,
        }
    }

    fn apply(&mut self, change: &RowUpdate, now: i64) {
        self.attempts = change.attempts.unwrap_or(self.attempts);
        if let Some(wait) = change.wait {
            self.available_at = now + in_micros(wait);
        }
        if change.error.is_some() {
            self.last_error.clone_from(&change.error);
        }
        match change.status {
            OutboxStatus::Done | OutboxStatus::Dead => self.finish(change.status, now),
            pending => {
                self.status = pending;
                self.lease_losses = 0;
                self.locked_by = None;
            }
        }
    }
}

#[doc(hidden)]
#[allow(missing_docs)]
impl MemoryTable {
    pub fn rows(&self) -> impl Iterator<Item = &Row> {
        self.rows.values()
    }

    pub fn row(&self, seq: i64) -> Option<&Row> {
        self.rows.get(&seq)
    }

    pub fn row_of(&self, event_id: &str) -> Option<&Row> {
        self.rows.get(self.by_id.get(event_id)?)
    }

    /// A row gets its number at the insert and not at the commit. As in a real database, a later number may commit
    /// first.
    pub(super) fn next_seq(&mut self) -> i64 {
        self.last_seq += 1;
        self.last_seq
    }

    pub(super) fn insert(&mut self, row: Row) {
        if row.is_pending() {
            self.pending.insert(row.position());
        }
        if row.status != OutboxStatus::Done
            && let Some(key) = &row.key
        {
            self.by_key.entry(key.clone()).or_default().insert(row.seq);
        }
        self.by_id.insert(row.event.id().to_owned(), row.seq);
        self.rows.insert(row.seq, row);
    }

    pub(super) fn remove(&mut self, seq: i64) -> Option<Row> {
        let row = self.rows.remove(&seq)?;
        self.pending.remove(&row.position());
        if let Some(key) = &row.key
            && let Some(of_key) = self.by_key.get_mut(key)
        {
            of_key.remove(&seq);
            if of_key.is_empty() {
                self.by_key.remove(key);
            }
        }
        self.by_id.remove(row.event.id());
        Some(row)
    }

    pub(super) fn change(&mut self, seq: i64, change: impl FnOnce(&mut Row)) {
        if let Some(mut row) = self.remove(seq) {
            change(&mut row);
            self.insert(row);
        }
    }

    /// Applies an update unless the row is finished. If claim ids are given, one of them must have leased the row.
    pub(super) fn settle(&mut self, update: &RowUpdate, claim_ids: Option<&[String]>, now: i64) -> bool {
        let is_claimed = |row: &Row| row.is_pending() && claim_ids.is_none_or(|claim_ids| row.is_claimed_by(claim_ids));
        let applies = self.row(update.seq).is_some_and(is_claimed);
        if applies {
            self.change(update.seq, |row| row.apply(update, now));
        }
        applies
    }

    pub(super) fn acquire_ownership(&mut self, owner: &str, lease: i64, now: i64) -> Owner {
        let is_owner = self.owner.as_deref() == Some(owner);
        // A lease that ends after more than a lease from now began before the clock was set back.
        let is_believed = self.owned_until <= now + lease + lease / 10;
        if !is_owner && self.owner.is_some() && now < self.owned_until && is_believed {
            return Owner::Other { remaining: std::time::Duration::from_micros((self.owned_until - now) as u64) };
        }
        if !is_owner {
            self.owner = Some(owner.to_owned());
            self.generation += 1;
        }
        self.owned_until = now + lease;
        Owner::Us { generation: self.generation }
    }

    pub(super) fn release_ownership(&mut self, owner: &str) {
        self.owner.take_if(|present| present == owner);
    }

    /// Moves the beginning of all leases by this much.
    pub(super) fn move_leases(&mut self, by: i64) {
        self.owned_until += by;
        self.rows.values_mut().for_each(|row| row.locked_at += by);
    }

    /// The fencing token that a settlement must have in single-node mode.
    pub fn fencing_token(&self) -> Option<String> {
        self.owner.as_ref().map(|owner| format!("{owner}:{}", self.generation))
    }

    /// The owner of the table at this time.
    pub fn owner_at(&self, now: i64) -> Option<&str> {
        self.owner.as_deref().filter(|_| now < self.owned_until)
    }

    /// The unfinished rows of the same key before this row.
    pub fn unfinished_before(&self, seq: i64, mode: Mode) -> Vec<i64> {
        let Some(of_key) = self.row(seq).and_then(|row| self.by_key.get(row.key.as_ref()?)) else { return Vec::new() };
        let blocks = |row: &Row| row.is_pending() || mode == Mode::ORDERED;
        of_key.range(..seq).copied().filter(|seq| self.row(*seq).is_some_and(blocks)).collect()
    }
}
