//! The hot path: an event goes from its commit straight to the listeners of the process that wrote it.
//!
//! ```text
//! begin()   HotPath::open      one claim for all rows of the transaction, if a dispatcher here may deliver them
//! write()   permit             a place in the hot queue, or the row waits in the table like any other
//!           insert             with the claim id: the row is pre-claimed before another process can see it
//!           pre_claim          the claim is remembered, the item is kept for the commit
//! commit()  HotPath::finish    committed: queued. Rolled back: the claims are removed. Unknown, or too late: released
//! ```

use std::collections::HashSet;
use std::sync::Arc;

use tokio::time::Instant;

use super::cursor::Cursor;
use super::releaser::{Unreleased, release_in_background};
use super::transaction::End;
use super::{Mode, OutboxItem, Owner, Store, Table};
use crate::claims::ClaimToken;
use crate::{Claimed, Event, HotDeadline, HotPermit, HotQueue};

/// The pre-claimed rows of one transaction.
pub(super) struct HotPath {
    queue: HotQueue<OutboxItem>,
    cursor: Arc<Cursor>,
    token: ClaimToken,
    /// The end of the lease of a row that is inserted now.
    until: Instant,
    deadline: HotDeadline,
    pre_claimed: Vec<(Claimed<OutboxItem>, HotPermit)>,
}

impl HotPath {
    /// `None` if this process has no dispatcher that may deliver the rows.
    pub(super) async fn open<S: Store>(table: &Table<S>) -> Option<Self> {
        // A relay that has stopped delivers nothing: owning the table would only keep other processes from it.
        let (queue, cursor) = table.hot_queue().filter(|(queue, _)| queue.is_open())?;
        let (queue, until, deadline) = (queue.clone(), Instant::now() + table.lease(), queue.deadline());
        let generation = match table.mode() {
            Mode::SingleNode => match table.acquire_ownership().await {
                Ok(Owner::Us { generation }) => generation,
                // The dispatcher of the owner will find the rows. If the database is out of reach, BEGIN says so.
                Ok(Owner::Other { .. }) | Err(_) => return None,
            },
            _ => 0,
        };
        let token = ClaimToken { number: cursor.claims.next_number(), generation };
        Some(Self { queue, cursor, token, until, deadline, pre_claimed: Vec::new() })
    }

    /// A place in the hot queue for this event. Delayed events have none.
    pub(super) fn permit(&self, event: &Event) -> Option<HotPermit> {
        if event.is_delayed() {
            self.queue.skip_delayed();
            return None;
        }
        self.queue.permit()
    }

    /// The claim id of the pre-claimed rows, in the modes that lease rows.
    pub(super) fn claim_id(&self, mode: Mode) -> Option<String> {
        mode.leases_rows().then(|| self.cursor.claim_id(self.token.number))
    }

    /// Adds the claim of a row that was inserted pre-claimed, before another process can see the row.
    pub(super) fn pre_claim(&mut self, seq: i64, event: &Event, permit: HotPermit) {
        self.cursor.claims.insert(seq, self.token, self.until, None);
        let item = OutboxItem {
            seq,
            created_at: chrono::Utc::now(),
            event: Arc::new(event.clone()),
            token: self.token,
            is_suspect: false,
        };
        self.pre_claimed.push((Claimed::new(item, 1, event.weight()), permit));
    }

    /// True if the row of this event was inserted pre-claimed.
    pub(super) fn has(&self, event_id: &str) -> bool {
        self.pre_claimed.iter().any(|(claimed, _)| claimed.item.event.id() == event_id)
    }

    /// Removes rows that the database has rolled back because of an error that the service ignored.
    pub(super) fn keep_only(&mut self, surviving: &HashSet<i64>) {
        for (lost, _) in self.pre_claimed.extract_if(.., |(claimed, _)| !surviving.contains(&claimed.item.seq)) {
            self.cursor.claims.remove(&lost.item);
        }
    }

    /// Queues the rows of a committed transaction, removes the claims of a rolled-back one, and releases the others.
    pub(super) fn finish<S: Store>(&mut self, table: &Table<S>, end: End) {
        let pre_claimed = std::mem::take(&mut self.pre_claimed);
        if pre_claimed.is_empty() {
            return;
        }
        let not_delivered = match end {
            End::Committed => match self.queue.push(pre_claimed, self.deadline) {
                Ok(()) => return,
                Err(too_late) => too_late,
            },
            End::Unknown => pre_claimed.into_iter().map(|(claimed, _)| claimed).collect(),
            End::RolledBack => {
                for (claimed, _) in &pre_claimed {
                    self.cursor.claims.remove(&claimed.item);
                }
                return;
            }
        };
        let items = not_delivered.into_iter().map(|claimed| claimed.item).collect();
        release_in_background(table.clone(), self.cursor.clone(), Unreleased::Items(items));
    }

    /// Releases the rows of writes that failed or were dropped half way. The rows may exist, leased with the claim id
    /// of this transaction, although this process does not know their numbers.
    pub(super) fn release_interrupted<S: Store>(&self, table: &Table<S>, ids: Vec<String>, is_committed: bool) {
        if let Some(claim_id) = self.claim_id(table.mode()) {
            let events = Unreleased::Events { claim_id, ids, is_committed };
            release_in_background(table.clone(), self.cursor.clone(), events);
        }
    }
}
