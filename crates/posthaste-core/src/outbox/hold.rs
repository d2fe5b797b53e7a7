use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::OutboxItem;

/// The rows that this process has claimed and not settled, by a clock that nobody sets.
#[derive(Default)]
pub(super) struct Holdings(Mutex<Held>);

#[derive(Default)]
struct Held {
    by_seq: HashMap<i64, Hold>,
    last_ticket: u64,
    /// While a claim is under way: what was let go since it began. The claim may have read those rows as they were
    /// before.
    gone: Option<HashSet<i64>>,
}

struct Hold {
    ticket: u64,
    generation: i64,
    until: Instant,
    /// Being recorded just now: must not expire into a second claim before that is through.
    settling: bool,
    /// Of a suspect: shared by all that were claimed with it, and given back when the last of them is let go.
    permit: Option<Arc<OwnedSemaphorePermit>>,
}

/// The fence of one claim, and until when it holds.
#[derive(Clone, Copy)]
pub(super) struct Grip {
    pub(super) ticket: u64,
    pub(super) generation: i64,
    pub(super) until: Instant,
}

impl Holdings {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Begins a claim, one at a time, and answers what it must leave out. Forgets what has expired or was claimed under
    /// an earlier ownership.
    pub(super) fn begin_claim(&self, generation: i64, now: Instant) -> Vec<i64> {
        let mut held = self.held();
        held.by_seq.retain(|_, hold| hold.generation == generation && (hold.until > now || hold.settling));
        held.gone = Some(HashSet::new());
        held.by_seq.keys().copied().collect()
    }

    /// Whether a row that the claim under way has read was held since it began: it may be settled by now.
    pub(super) fn met_in_passing(&self, seq: i64) -> bool {
        let held = self.held();
        held.by_seq.contains_key(&seq) || held.gone.as_ref().is_some_and(|gone| gone.contains(&seq))
    }

    pub(super) fn end_claim(&self) {
        self.held().gone = None;
    }

    /// The ticket of a new claim.
    pub(super) fn next_ticket(&self) -> u64 {
        let mut held = self.held();
        held.last_ticket += 1;
        held.last_ticket
    }

    /// Holds a row.
    pub(super) fn hold(&self, seq: i64, grip: Grip, permit: Option<Arc<OwnedSemaphorePermit>>) {
        let Grip { ticket, generation, until } = grip;
        let hold = Hold { ticket, generation, until, settling: false, permit };
        self.held().by_seq.insert(seq, hold);
    }

    /// Whether the item is still held.
    pub(super) fn has(&self, item: &OutboxItem) -> bool {
        self.held().of(item).is_some()
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

    /// Lets an item go, and says whether a permit came back with it.
    pub(super) fn let_go(&self, item: &OutboxItem) -> bool {
        let mut held = self.held();
        if held.of(item).is_none() {
            return false;
        }
        if let Some(gone) = &mut held.gone {
            gone.insert(item.seq);
        }
        let permit = held.by_seq.remove(&item.seq).and_then(|hold| hold.permit);
        permit.is_some_and(|permit| Arc::into_inner(permit).is_some())
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
        Settling { holdings: self, items: of_ours }
    }
}

impl Held {
    fn of(&mut self, item: &OutboxItem) -> Option<&mut Hold> {
        self.by_seq.get_mut(&item.seq).filter(|hold| hold.ticket == item.ticket)
    }
}

/// Items on their way to be recorded. Dropped before that is known, they are held as before.
pub(super) struct Settling<'a> {
    holdings: &'a Holdings,
    items: Vec<&'a OutboxItem>,
}

impl<'a> Settling<'a> {
    /// A part of those that were asked for, in the same order; the others are no longer held by their claim.
    pub(super) fn items(&self) -> &[&'a OutboxItem] {
        &self.items
    }

    /// Lets them go but for those that are `locked` and so not recorded, and says whether a permit came back.
    pub(super) fn recorded(self, locked: &HashSet<i64>) -> bool {
        let mut came_back = false;
        for item in self.items.iter().filter(|item| !locked.contains(&item.seq)) {
            came_back |= self.holdings.let_go(item);
        }
        came_back
    }
}

impl Drop for Settling<'_> {
    fn drop(&mut self) {
        let mut held = self.holdings.held();
        for item in &self.items {
            if let Some(hold) = held.of(item) {
                hold.settling = false;
            }
        }
    }
}
