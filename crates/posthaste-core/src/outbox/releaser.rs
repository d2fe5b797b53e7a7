use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use super::lane::Lane;
use super::source::in_time;
use super::{Leases, OutboxItem, Store, Table};
use crate::StoreError;

/// Leases of this process that end without a delivery, though nobody knows yet whether their rows exist.
///
/// A transaction whose end is unknown may commit after the first attempt to release its rows, and so may a claim whose
/// answer was lost. So an attempt that finds nothing is repeated until the rows are seen, or until their leases have
/// ended anyway.
pub(super) enum Unreleased {
    /// Rows of a transaction whose outcome is unknown, or that came too late for the hot queue.
    Items(Vec<OutboxItem>),
    /// Events of a write that was dropped half way: their rows, if they exist, are leased by this lock.
    Events {
        /// The lock of the write.
        lock: String,
        /// Their ids.
        ids: Vec<String>,
        /// Their transaction is known to have committed: rows that are not there will never be.
        is_committed: bool,
    },
    /// Claims whose answer never came, known by their locks only.
    Claims(Vec<String>),
}

/// Releases them in the background, until that is known to have worked.
pub(super) fn release_in_background<S: Store>(table: Table<S>, lane: Arc<Lane>, leases: Unreleased) {
    match Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn(release(table, lane, leases))),
        Err(_) => tracing::warn!("a transaction ended outside of the runtime: its events wait for their leases to end"),
    }
}

async fn release<S: Store>(table: Table<S>, lane: Arc<Lane>, mut leases: Unreleased) {
    let until = Instant::now() + table.row_lease();
    let mut pause = Duration::from_millis(20);
    let longest = match leases {
        // Nothing but a search through the head of the table finds these.
        Unreleased::Claims(_) => table.row_lease() / 4,
        Unreleased::Items(_) | Unreleased::Events { .. } => Duration::from_secs(1),
    };
    loop {
        match attempt(&table, &lane, &leases).await {
            Ok(seen) => {
                leases.remove_seen(&lane, &seen);
                if !seen.is_empty() {
                    table.committed();
                }
            }
            Err(error) => {
                tracing::warn!(error = error.chain(), "failed to release leases; trying again");
            }
        }
        if leases.is_empty() {
            return;
        }
        if Instant::now() >= until {
            // Single node: what this process holds in memory must not outlast what it waits for.
            leases.forget(&lane);
            table.committed();
            return;
        }
        sleep(pause).await;
        pause = (pause * 2).min(longest);
    }
}

/// Answers with the numbers of the rows that are known to exist.
async fn attempt<S: Store>(table: &Table<S>, lane: &Lane, leases: &Unreleased) -> Result<HashSet<i64>, StoreError> {
    if !table.mode().leases_rows() {
        // Nothing is leased: the rows are free as soon as this process forgets them.
        leases.forget(lane);
        return Ok(leases.rows().collect());
    }
    let locks = leases.locks(lane);
    let rows: Vec<i64> = leases.rows().collect();
    let leases = match leases {
        Unreleased::Items(_) => Leases::OfRows { locks: &locks, rows: &rows },
        Unreleased::Events { ids, .. } => Leases::OfEvents { locks: &locks, ids },
        Unreleased::Claims(_) => Leases::OfClaims { locks: &locks },
    };
    in_time(table, table.store().release(&leases)).await
}

impl Unreleased {
    fn locks(&self, lane: &Lane) -> Vec<String> {
        match self {
            Self::Items(items) => lane.locks(items.iter()),
            Self::Events { lock, .. } => vec![lock.clone()],
            Self::Claims(locks) => locks.clone(),
        }
    }

    fn rows(&self) -> impl Iterator<Item = i64> {
        let items = match self {
            Self::Items(items) => items.as_slice(),
            Self::Events { .. } | Self::Claims(_) => &[],
        };
        items.iter().map(|item| item.seq)
    }

    fn forget(&self, lane: &Lane) {
        if let Self::Items(items) = self {
            for item in items {
                lane.holdings.let_go(item);
            }
        }
    }

    /// Rows that exist are free now, or somebody else's.
    fn remove_seen(&mut self, lane: &Lane, seen: &HashSet<i64>) {
        match self {
            Self::Items(items) => {
                for item in items.extract_if(.., |item| seen.contains(&item.seq)) {
                    lane.holdings.let_go(&item);
                }
            }
            // A statement inserts all of its events or none, and the rows of a write are seen together.
            Self::Events { ids, is_committed, .. } if *is_committed || !seen.is_empty() => ids.clear(),
            Self::Claims(locks) if !seen.is_empty() => locks.clear(),
            Self::Events { .. } | Self::Claims(_) => {}
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Items(items) => items.is_empty(),
            Self::Events { ids, .. } => ids.is_empty(),
            Self::Claims(locks) => locks.is_empty(),
        }
    }
}
