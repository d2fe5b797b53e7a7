use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};

use crate::{Event, StoreError};

/// How many due rows are searched for the rows of a lost claim. Claims start at the head of the table.
pub const LOST_CLAIM_SCAN: usize = 100_000;

/// How many rows of each key are unblocked when rows of this many keys are finished together: in all, as many as one
/// claim returns. The next claim blocks again what it does not claim, so unblocking more rows would cost more than it
/// saves.
pub fn unblock_limit(keys: usize) -> usize {
    (500 / keys.max(1)).clamp(5, 100)
}

/// Claims of due rows.
#[async_trait]
pub trait ClaimStore {
    /// Claims due rows, in the order of (`available_at`, `seq`). A row MUST NOT be claimed that is not due, not
    /// pending, in flight in this process, or leased by a lease that has not ended.
    ///
    /// - Single node: the rows are read, and nothing is written.
    /// - Multi node: due rows are locked and given to [`select`](crate::outbox::select), and what it selects is carried
    ///   out. Its claimed rows are leased (`locked_by` is the claim id, `locked_at` is `now`, `lease_losses` is its
    ///   `losses`), and its dead row becomes DEAD with its error and is returned as dead. Suspects are candidates only
    ///   if the request allows them.
    /// - Ordered: as multi node, with keys and predecessors. The rows that `select` blocks are marked as blocked: later
    ///   claims do not read them until a row before them is finished, which unblocks some of the rows after it.
    ///
    /// A lease has ended when it is as old as a lease is long. A lease that began in the future by more than a tenth of
    /// its length has ended too: the clock was set back, and it is unknown when the lease began.
    ///
    /// An error of kind [`OutcomeUnknown`](crate::FaultKind::OutcomeUnknown) means that rows may have been leased.
    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, StoreError>;

    /// Returns how long until the first pending row is due that is not in flight in this process, not leased, not
    /// blocked and, unless the request allows suspects, not a suspect. If the request allows suspects, the end of the
    /// first lease of a row that is not in flight in this process counts as well. Limit, position and claim id are
    /// ignored.
    async fn next_due(&self, request: &ClaimRequest<'_>) -> Result<Option<Duration>, StoreError>;

    /// Ordered mode: reads at most `limit` blocked rows after a position.
    async fn blocked_rows(&self, after: Option<Position>, limit: usize) -> Result<BlockedRows, StoreError>;

    /// Ordered mode: returns those of the rows that are unfinished and that no transaction has locked, so that none is about
    /// to be finished. It MUST hold no lock on them when it returns, also if this process does not read the answer for long.
    async fn unlocked_unfinished(&self, rows: &[i64]) -> Result<HashSet<i64>, StoreError>;

    /// Ordered mode: unblocks these rows, so that claims read them again.
    async fn unblock_rows(&self, rows: &[i64]) -> Result<(), StoreError>;

    /// The event types with pending rows that are due.
    async fn pending_types(&self) -> Result<Vec<String>, StoreError>;
}

/// The parameters of a claim.
#[derive(Clone, Debug)]
pub struct ClaimRequest<'a> {
    /// `None` for all event types.
    pub event_type: Option<&'a str>,
    /// The rows that this process has in flight.
    pub in_flight: &'a [i64],
    /// How many rows at most.
    pub limit: usize,
    /// Only rows after this position.
    pub after: Option<Position>,
    /// Written into the rows that are leased. Unique per claim.
    pub claim_id: &'a str,
    /// How long a lease lasts.
    pub lease: Duration,
    /// True if rows that lost a lease may be claimed.
    pub allow_suspects: bool,
    /// Only rows whose `created_at` is at least this long before `now`.
    pub skip_recent: Duration,
}

/// A position in the order of delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// When the row is due, in the store's own unit.
    pub due: i64,
    /// The number of the row.
    pub seq: i64,
}

/// The result of a claim.
#[derive(Debug, Default)]
pub struct ClaimedRows {
    /// In the order of delivery.
    pub rows: Vec<ClaimedRow>,
    /// There may be more, although fewer rows were claimed than the limit.
    pub more: bool,
    /// The last position that was read.
    pub last: Option<Position>,
    /// Ordered: the rows that this claim has blocked, each with the row before it that it waits for. They are checked once
    /// more after the claim; a store that lets nobody else write during a claim leaves this empty.
    pub blocked: Vec<(i64, i64)>,
}

/// Blocked rows, as a sweep reads them.
#[derive(Clone, Debug, Default)]
pub struct BlockedRows {
    /// Those of the rows that no unfinished row of their key precedes.
    pub orphans: Vec<i64>,
    /// The last row that was read, if there may be more.
    pub last: Option<Position>,
}

/// A row as a claim reads it.
#[derive(Debug)]
pub struct ClaimedRow {
    /// Its position in the order of delivery.
    pub position: Position,
    /// When it was inserted, by the database's clock.
    pub created_at: DateTime<Utc>,
    /// How often it was tried, and the event; or why the row cannot be read as an event.
    pub event: Result<(u32, Event), String>,
    /// It lost so many leases that it is DEAD now.
    pub is_dead: bool,
    /// It lost a lease before.
    pub is_suspect: bool,
    /// Ordered: its aggregate.
    pub key: Option<Arc<str>>,
}
