use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use super::cursor::Cursor;
use super::source::in_time;
use super::{LeaseSet, OutboxItem, Store, Table};
use crate::{Backoff, StoreError};

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
        claim_id: String,
        /// Their ids.
        ids: Vec<String>,
        /// Their transaction is known to have committed: rows that are not there will never be.
        is_committed: bool,
    },
    /// Claims whose answer never came, known by their locks only.
    Claims(Vec<String>),
}

/// Releases them in the background, until that is known to have worked.
pub(super) fn release_in_background<S: Store>(table: Table<S>, cursor: Arc<Cursor>, leases: Unreleased) {
    match Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn(release(table, cursor, leases))),
        Err(_) => tracing::warn!("a transaction ended outside of the runtime: its events wait for their leases to end"),
    }
}

async fn release<S: Store>(table: Table<S>, cursor: Arc<Cursor>, mut leases: Unreleased) {
    let until = Instant::now() + table.row_lease();
    let longest = match leases {
        // Nothing but a search through the head of the table finds these.
        Unreleased::Claims(_) => table.row_lease() / 4,
        Unreleased::Items(_) | Unreleased::Events { .. } => Duration::from_secs(1),
    };
    let mut backoff = Backoff::new(Duration::from_millis(20), longest);
    loop {
        match attempt(&table, &cursor, &leases).await {
            Ok(seen) => {
                leases.remove_seen(&cursor, &seen);
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
            leases.forget(&cursor);
            table.committed();
            return;
        }
        sleep(backoff.next_pause()).await;
    }
}

/// Answers with the numbers of the rows that are known to exist.
async fn attempt<S: Store>(table: &Table<S>, cursor: &Cursor, leases: &Unreleased) -> Result<HashSet<i64>, StoreError> {
    if !table.mode().leases_rows() {
        // Nothing is leased: the rows are free as soon as this process forgets them.
        leases.forget(cursor);
        return Ok(leases.rows().collect());
    }
    let claim_ids = leases.locks(cursor);
    let rows: Vec<i64> = leases.rows().collect();
    let leases = match leases {
        Unreleased::Items(_) => LeaseSet::Rows { claim_ids: &claim_ids, rows: &rows },
        Unreleased::Events { ids, .. } => LeaseSet::Events { claim_ids: &claim_ids, ids },
        Unreleased::Claims(_) => LeaseSet::Claims { claim_ids: &claim_ids },
    };
    in_time(table, table.store().release(&leases)).await
}

impl Unreleased {
    fn locks(&self, cursor: &Cursor) -> Vec<String> {
        match self {
            Self::Items(items) => cursor.claim_ids(items.iter()),
            Self::Events { claim_id, .. } => vec![claim_id.clone()],
            Self::Claims(claim_ids) => claim_ids.clone(),
        }
    }

    fn rows(&self) -> impl Iterator<Item = i64> {
        let items = match self {
            Self::Items(items) => items.as_slice(),
            Self::Events { .. } | Self::Claims(_) => &[],
        };
        items.iter().map(|item| item.seq)
    }

    fn forget(&self, cursor: &Cursor) {
        if let Self::Items(items) = self {
            for item in items {
                cursor.claims.remove(item);
            }
        }
    }

    /// Rows that exist are free now, or somebody else's.
    fn remove_seen(&mut self, cursor: &Cursor, seen: &HashSet<i64>) {
        match self {
            Self::Items(items) => {
                for item in items.extract_if(.., |item| seen.contains(&item.seq)) {
                    cursor.claims.remove(&item);
                }
            }
            // A statement inserts all of its events or none, and the rows of a write are seen together.
            Self::Events { ids, is_committed, .. } if *is_committed || !seen.is_empty() => ids.clear(),
            Self::Claims(claim_ids) if !seen.is_empty() => claim_ids.clear(),
            Self::Events { .. } | Self::Claims(_) => {}
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Items(items) => items.is_empty(),
            Self::Events { ids, .. } => ids.is_empty(),
            Self::Claims(claim_ids) => claim_ids.is_empty(),
        }
    }
}
