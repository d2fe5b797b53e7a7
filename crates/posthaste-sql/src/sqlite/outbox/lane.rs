use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use posthaste_core::Wakeup;

use super::rows;
use super::source::OutboxItem;
use crate::TableName;

/// What the sources of one name share: their signal, and what they hold.
pub(super) struct Lane {
    /// `None` for all event types.
    pub(super) event_type: Option<String>,
    /// What it claims with, see [`rows::pending`].
    pub(super) pending: String,
    /// See [`rows::next_due`].
    pub(super) next_due: String,
    pub(super) wakeup: Wakeup,
    /// One claim at a time: between a claim's reading of what is held and its holding more, nobody else may hold.
    pub(super) claiming: tokio::sync::Mutex<()>,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    by_seq: HashMap<i64, Hold>,
    last_ticket: u64,
}

struct Hold {
    /// Tells two claims of the same row apart.
    ticket: u64,
    generation: i64,
    until: Instant,
    /// Being recorded just now: must not expire into a second claim before that is through.
    settling: bool,
}

impl Lane {
    /// The empty name stands for all event types.
    pub(super) fn new(table: &TableName, name: &str) -> Self {
        let event_type = (!name.is_empty()).then(|| name.to_owned());
        Self {
            pending: rows::pending(table, event_type.is_some()),
            next_due: rows::next_due(table, event_type.is_some()),
            event_type,
            wakeup: Wakeup::default(),
            claiming: tokio::sync::Mutex::new(()),
            held: Mutex::default(),
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What must not be claimed now. Forgets what has expired or was claimed under an earlier ownership.
    pub(super) fn still_held(&self, generation: i64, now: Instant) -> Vec<i64> {
        let mut held = self.held();
        held.by_seq.retain(|_, hold| hold.generation == generation && (hold.until > now || hold.settling));
        held.by_seq.keys().copied().collect()
    }

    /// Holds a row and answers with the ticket of this claim.
    pub(super) fn hold(&self, seq: i64, generation: i64, until: Instant) -> u64 {
        let mut held = self.held();
        held.last_ticket += 1;
        let ticket = held.last_ticket;
        held.by_seq.insert(seq, Hold { ticket, generation, until, settling: false });
        ticket
    }

    /// Whether the item is still held, and then for longer.
    pub(super) fn extend(&self, item: &OutboxItem, generation: i64, until: Instant) -> bool {
        match self.held().of(item) {
            Some(hold) if hold.generation == generation => {
                hold.until = until;
                true
            }
            _ => false,
        }
    }

    /// Lets an item go.
    pub(super) fn let_go(&self, item: &OutboxItem) {
        let mut held = self.held();
        if held.of(item).is_some() {
            held.by_seq.remove(&item.seq);
        }
    }

    /// Keeps those items that are still held from expiring while they are recorded.
    pub(super) fn settling<'a>(&'a self, items: impl Iterator<Item = &'a OutboxItem>) -> Settling<'a> {
        let mut held = self.held();
        let mut of_ours = Vec::new();
        for item in items {
            // An item that stands twice in one settlement is ours the first time only.
            if let Some(hold) = held.of(item).filter(|hold| !hold.settling) {
                hold.settling = true;
                of_ours.push(item);
            }
        }
        Settling { lane: self, items: of_ours }
    }
}

impl Held {
    fn of(&mut self, item: &OutboxItem) -> Option<&mut Hold> {
        self.by_seq.get_mut(&item.seq).filter(|hold| hold.ticket == item.ticket)
    }
}

/// Items on their way to be recorded. Dropped before that is known, they are held as before.
pub(super) struct Settling<'a> {
    lane: &'a Lane,
    items: Vec<&'a OutboxItem>,
}

impl<'a> Settling<'a> {
    pub(super) fn items(&self) -> &[&'a OutboxItem] {
        &self.items
    }

    pub(super) fn recorded(self) {
        self.items.iter().for_each(|item| self.lane.let_go(item));
    }
}

impl Drop for Settling<'_> {
    fn drop(&mut self) {
        let mut held = self.lane.held();
        for item in &self.items {
            if let Some(hold) = held.of(item) {
                hold.settling = false;
            }
        }
    }
}
