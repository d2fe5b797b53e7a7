use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::hold::Holdings;
use super::{OutboxItem, Position};
use crate::Wakeup;

/// How the lock of a suspect ends whose delivery has started.
pub const STARTED: &str = ":started";

/// How often a drain looks at what lies behind it.
const SWEEP: Duration = Duration::from_millis(250);

/// What the sources of one name share: their signal, where they read, and what they hold.
pub(super) struct Lane {
    /// `None` for all event types.
    pub(super) event_type: Option<String>,
    /// In whose name rows are leased. Unique per process start, and no two lanes lease the same row.
    id: String,
    pub(super) wakeup: Wakeup,
    /// One claim at a time: between a claim's reading of what is held and its holding more, nobody else may claim.
    pub(super) claiming: tokio::sync::Mutex<Reading>,
    pub(super) holdings: Holdings,
    anew: AtomicBool,
}

impl Lane {
    /// The empty name stands for all event types.
    pub(super) fn new(name: &str, id: String) -> Self {
        Self {
            event_type: (!name.is_empty()).then(|| name.to_owned()),
            id,
            wakeup: Wakeup::default(),
            claiming: tokio::sync::Mutex::new(Reading { behind: None, swept: Instant::now() }),
            holdings: Holdings::default(),
            anew: AtomicBool::new(false),
        }
    }

    /// Unique per process start.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// What a claim writes into the rows that it leases. Unique per claim, not only per process: a claim that expired
    /// and was made again fences its elder.
    pub(super) fn lock(&self, ticket: u64) -> String {
        format!("{}:{ticket}", self.id)
    }

    /// What the lock of a claim becomes when a suspect is about to be delivered. Only a suspect whose lock says so may
    /// have crashed the process that held it: a claim whose answer was lost has delivered nothing.
    pub(super) fn started_lock(&self, ticket: u64) -> String {
        format!("{}{STARTED}", self.lock(ticket))
    }

    /// What the row of this item is leased with.
    pub(super) fn lock_of(&self, item: &OutboxItem) -> String {
        match item.is_suspect {
            true => self.started_lock(item.ticket),
            false => self.lock(item.ticket),
        }
    }

    /// What the rows of these items are leased with.
    pub(super) fn locks<'a>(&self, items: impl Iterator<Item = &'a OutboxItem>) -> Vec<String> {
        let claims: BTreeSet<(u64, bool)> = items.map(|item| (item.ticket, item.is_suspect)).collect();
        let lock = |(ticket, is_suspect)| if is_suspect { self.started_lock(ticket) } else { self.lock(ticket) };
        claims.into_iter().map(lock).collect()
    }

    /// Something behind the reader may be claimable again.
    pub(super) fn look_from_the_beginning(&self) {
        self.anew.store(true, Ordering::Release);
    }

    /// Behind which position the next claim begins; `None` is the beginning.
    pub(super) fn start(&self, reading: &mut Reading, now: Instant) -> Option<Position> {
        let anew = self.anew.swap(false, Ordering::AcqRel);
        if anew || now.duration_since(reading.swept) >= SWEEP {
            reading.behind = None;
        }
        if reading.behind.is_none() {
            reading.swept = now;
        }
        reading.behind
    }
}

/// How far a drain has come: a claim need not wade through what this process holds and what it has just finished,
/// whose index entries may stay for a while.
///
/// A bound for speed and never a promise, because rows appear behind it when their transactions commit late. So it is
/// given up when a claim comes back short, and from time to time.
pub(super) struct Reading {
    /// The last row of the last claim, where that was full.
    pub(super) behind: Option<Position>,
    swept: Instant,
}
