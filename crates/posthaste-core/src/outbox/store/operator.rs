use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};

use crate::outbox::OutboxStatus;
use crate::{Event, StoreError};

/// How many event types [`OperatorStore::oldest_due_by_type`] lists at most. A program that writes another type into every
/// row must not make the list as long as the table.
pub const MAX_LISTED_TYPES: usize = 20_000;

/// Operator queries and maintenance of an outbox table.
///
/// # Laws
///
/// - Only DEAD rows are listed, counted, replayed and discarded.
/// - `replay` makes them NEW with no attempts, due `now`, without `done_at`, `last_error`, lease and `lease_losses`.
/// - `discard` deletes them; in ordered mode, the rows that they blocked are unblocked.
/// - `purge` never deletes a pending row, except with [`Purge::Everything`]. In ordered mode, the rows that a purged
///   DEAD row blocked are unblocked.
#[async_trait]
pub trait OperatorStore {
    /// The row of one event, whatever its status.
    async fn find(&self, event_id: &str) -> Result<Option<OutboxRow>, StoreError>;

    /// DEAD rows, oldest (by their number) first.
    async fn dead(&self, filter: &DeadFilter, limit: usize) -> Result<Vec<OutboxRow>, StoreError>;

    /// How many DEAD rows there are.
    async fn count_dead(&self, filter: &DeadFilter) -> Result<u64, StoreError>;

    /// Replays at most `limit` DEAD rows with numbers above `after`, oldest first. Returns how many there were, and the
    /// number of the last.
    async fn replay(&self, filter: &DeadFilter, after: i64, limit: usize) -> Result<(u64, i64), StoreError>;

    /// Deletes one DEAD row. True if there was one.
    async fn discard(&self, event_id: &str) -> Result<bool, StoreError>;

    /// Deletes at most `limit` rows, oldest first, in one transaction. Returns how many.
    async fn purge(&self, purge: Purge, older_than: Duration, limit: usize) -> Result<u64, StoreError>;

    /// How many rows are pending, counted up to `limit`.
    async fn count_pending(&self, limit: usize) -> Result<u64, StoreError>;

    /// The age of the oldest pending row that is due, by its `available_at`; `None` if no row is due.
    async fn oldest_due(&self) -> Result<Option<Duration>, StoreError>;

    /// The same for each event type with due rows, for at most [`MAX_LISTED_TYPES`] types.
    async fn oldest_due_by_type(&self) -> Result<Vec<(String, Duration)>, StoreError>;

    /// Ordered mode: the age of the oldest due row that is not blocked; `None` if there is none. Rows that wait for
    /// another row of their key do not count.
    async fn oldest_unblocked(&self) -> Result<Option<Duration>, StoreError>;
}

/// Selects DEAD rows. A field that is `None` matches every row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeadFilter {
    /// Only the event with this id.
    pub event_id: Option<String>,
    /// Only events of this type.
    pub event_type: Option<String>,
    /// Only events of aggregates of this type.
    pub aggregate_type: Option<String>,
}

impl DeadFilter {
    /// All DEAD rows.
    pub fn all() -> Self {
        Self::default()
    }

    /// Only events of this type.
    #[must_use]
    pub fn event_type(mut self, event_type: impl Into<String>) -> Self {
        self.event_type = Some(event_type.into());
        self
    }

    /// Only events of aggregates of this type.
    #[must_use]
    pub fn aggregate_type(mut self, aggregate_type: impl Into<String>) -> Self {
        self.aggregate_type = Some(aggregate_type.into());
        self
    }
}

/// What a purge deletes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purge {
    /// DONE rows by `done_at`, or by `created_at` if that is empty.
    Done,
    /// DEAD rows by `done_at`, or by `created_at` if that is empty.
    Dead,
    /// Every row by `created_at`: for tables that another tool reads.
    Everything,
}

/// One row of the outbox as an operator sees it.
#[derive(Clone, Debug)]
pub struct OutboxRow {
    /// The number of the row: its position in the order of insertion.
    pub seq: i64,
    /// The event id, even if the row cannot be read as an event.
    pub event_id: String,
    /// `None` when the row cannot be read as an event; the reason is in `last_error` once it was claimed.
    pub event: Option<Event>,
    /// Its status.
    pub status: OutboxStatus,
    /// How many failed attempts were counted.
    pub attempts: u32,
    /// When it is due, or was.
    pub available_at: DateTime<Utc>,
    /// When it was written, by the database's clock.
    pub created_at: DateTime<Utc>,
    /// When it was delivered or given up.
    pub done_at: Option<DateTime<Utc>>,
    /// Why it last failed.
    pub last_error: Option<String>,
    /// The claim id of its lease.
    pub locked_by: Option<String>,
    /// When the lease began.
    pub locked_at: Option<DateTime<Utc>>,
    /// How many of its leases expired since the end of its last attempt.
    pub lease_losses: u32,
}
