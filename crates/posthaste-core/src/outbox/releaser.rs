use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use super::cursor::Cursor;
use super::source::in_time;
use super::{LeaseSet, OutboxItem, SettledRows, Store, Table};
use crate::{Backoff, StoreError};

/// Leases that this process must release, although it does not know yet if their rows exist.
///
/// A transaction whose outcome is unknown may commit after the first attempt to release its rows, and so may a claim
/// whose result was lost. So an attempt that finds nothing is repeated until the rows are seen, or until their leases
/// have ended anyway.
pub(super) enum Unreleased {
    /// Rows of a transaction whose outcome is unknown, or that came too late for the hot queue.
    Items(Vec<OutboxItem>),
    /// Events of a write that was dropped half way: their rows, if they exist, are leased with this claim id.
    Events {
        /// The claim id of the write.
        claim_id: String,
        /// The ids of the events.
        ids: Vec<String>,
        /// Their transaction is known to have committed: a row that does not exist now never will.
        is_committed: bool,
    },
    /// Claims whose result never came: only their claim ids are known.
    Claims(Vec<String>),
}

/// Releases these leases in the background, and tries again until they are known to be released.
pub(super) fn release_in_background<S: Store>(table: Table<S>, cursor: Arc<Cursor>, leases: Unreleased) {
    match Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn(release(table, cursor, leases))),
        Err(_) => tracing::warn!("a transaction ended outside of the runtime: its events wait for their leases to end"),
    }
}

async fn release<S: Store>(table: Table<S>, cursor: Arc<Cursor>, mut leases: Unreleased) {
    let until = Instant::now() + table.row_lease();
    let longest = match leases {
        // Only a scan through the head of the table finds these, so it is repeated less often.
        Unreleased::Claims(_) => table.row_lease() / 4,
        Unreleased::Items(_) | Unreleased::Events { .. } => Duration::from_secs(1),
    };
    let mut backoff = Backoff::new(Duration::from_millis(20), longest);
    loop {
        match attempt(&table, &cursor, &leases).await {
            Ok(released) => {
                leases.remove_released(&cursor, &released);
                if !released.applied.is_empty() {
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
            // The claims in memory must not outlast the leases.
            leases.forget(&cursor);
            table.committed();
            return;
        }
        sleep(backoff.next_pause()).await;
    }
}

async fn attempt<S: Store>(table: &Table<S>, cursor: &Cursor, leases: &Unreleased) -> Result<SettledRows, StoreError> {
    if !table.mode().leases_rows() {
        // No row is leased: the rows are free as soon as this process removes its claims.
        leases.forget(cursor);
        return Ok(SettledRows { applied: leases.rows().collect(), ..SettledRows::default() });
    }
    let claim_ids = leases.claim_ids(cursor);
    let rows: Vec<i64> = leases.rows().collect();
    let leases = match leases {
        Unreleased::Items(_) => LeaseSet::Rows { claim_ids: &claim_ids, rows: &rows },
        Unreleased::Events { ids, .. } => LeaseSet::Events { claim_ids: &claim_ids, ids },
        Unreleased::Claims(_) => LeaseSet::Claims { claim_ids: &claim_ids },
    };
    // Claims wait for the releases of claims whose answers were lost, so these do not accumulate.
    let _may_run = table.claim_permit().await;
    in_time(table, table.store().release(&leases)).await
}

impl Unreleased {
    fn claim_ids(&self, cursor: &Cursor) -> Vec<String> {
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

    /// Removes the leases of rows that exist and are free now, or claimed by another process.
    fn remove_released(&mut self, cursor: &Cursor, released: &SettledRows) {
        // The rows of a write, or of a claim, are seen together: a statement writes all of them or none.
        let some_are_seen = !released.applied.is_empty();
        match self {
            Self::Items(items) => {
                for item in items.extract_if(.., |item| released.applied.contains(&item.seq)) {
                    cursor.claims.remove(&item);
                }
            }
            Self::Events { .. } | Self::Claims(_) if !released.locked.is_empty() => {}
            Self::Events { ids, is_committed, .. } if *is_committed || some_are_seen => ids.clear(),
            Self::Claims(claim_ids) if some_are_seen => claim_ids.clear(),
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
