use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::row_claims::RowClaims;
use super::{OutboxItem, Position};
use crate::Wakeup;

/// The end of the claim id of a suspect whose delivery has started.
pub const STARTED: &str = ":started";

/// How often a scan returns to the beginning of the table.
const RESTART_INTERVAL: Duration = Duration::from_millis(250);

/// One reader of a table within this process: all event types, or one. Its sources share their scan position, their
/// claims and their wake-up.
pub(super) struct Cursor {
    /// `None` for all event types.
    pub(super) event_type: Option<String>,
    /// The first part of its claim ids. Unique per process start; no two cursors lease the same row.
    id: String,
    pub(super) wakeup: Wakeup,
    /// Locked by the running claim. No other claim may run between the moment at which it reads the rows in flight and
    /// the moment at which it adds to them.
    pub(super) claiming: tokio::sync::Mutex<ScanPosition>,
    pub(super) claims: RowClaims,
    restart: AtomicBool,
}

impl Cursor {
    /// The empty name stands for all event types.
    pub(super) fn new(name: &str, id: String) -> Self {
        Self {
            event_type: (!name.is_empty()).then(|| name.to_owned()),
            id,
            wakeup: Wakeup::default(),
            claiming: tokio::sync::Mutex::new(ScanPosition { after: None, restarted_at: Instant::now() }),
            claims: RowClaims::default(),
            restart: AtomicBool::new(false),
        }
    }

    /// Unique per process start.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// The claim id that a claim writes into the rows that it leases. It is unique per claim and not only per process:
    /// when a row is claimed again after its lease ended, the new id fences off the old claim.
    pub(super) fn claim_id(&self, number: u64) -> String {
        format!("{}:{number}", self.id)
    }

    /// The claim id that replaces the first one when a suspect is about to be delivered. Only a suspect with such a
    /// claim id can have crashed the process that claimed it: a claim whose result was lost has delivered nothing.
    pub(super) fn started_claim_id(&self, number: u64) -> String {
        format!("{}{STARTED}", self.claim_id(number))
    }

    /// The claim id in the row of this item.
    pub(super) fn claim_id_of(&self, item: &OutboxItem) -> String {
        match item.is_suspect {
            true => self.started_claim_id(item.token.number),
            false => self.claim_id(item.token.number),
        }
    }

    /// The claim ids in the rows of these items, each once.
    pub(super) fn claim_ids<'a>(&self, items: impl Iterator<Item = &'a OutboxItem>) -> Vec<String> {
        let ids: BTreeSet<String> = items.map(|item| self.claim_id_of(item)).collect();
        ids.into_iter().collect()
    }

    /// A row before the scan position may be claimable again.
    pub(super) fn restart_scan(&self) {
        self.restart.store(true, Ordering::Release);
    }

    /// Where the next claim starts to read; `None` is the beginning of the table.
    pub(super) fn scan_start(&self, scan: &mut ScanPosition, now: Instant) -> Option<Position> {
        let restart = self.restart.swap(false, Ordering::AcqRel);
        if restart || now.duration_since(scan.restarted_at) >= RESTART_INTERVAL {
            scan.after = None;
        }
        if scan.after.is_none() {
            scan.restarted_at = now;
        }
        scan.after
    }
}

/// How far a scan has read. A claim that starts there need not skip the rows that this process has in flight or has
/// just settled, whose index entries may stay for a while.
///
/// This is for speed only. Rows appear before this position when their transactions commit late, so the scan restarts
/// when a claim is not full, and every [`RESTART_INTERVAL`].
pub(super) struct ScanPosition {
    /// The last row of the last claim, if that claim was full.
    pub(super) after: Option<Position>,
    restarted_at: Instant,
}
