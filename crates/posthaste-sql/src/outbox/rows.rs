use std::sync::Arc;

use chrono::{DateTime, Utc};
use posthaste_core::Event;

/// A claimed event.
#[derive(Clone, Debug)]
pub struct OutboxItem {
    /// Its place in the order of insertion.
    pub seq: i64,
    /// Of the ownership under which it was claimed; 0 where rows are leased one by one.
    pub generation: i64,
    /// When it was inserted, by the database's clock.
    pub created_at: DateTime<Utc>,
    /// What happened.
    pub event: Arc<Event>,
    /// Of the claim: tells two claims of the same row apart.
    pub(crate) ticket: u64,
}

impl AsRef<Arc<Event>> for OutboxItem {
    fn as_ref(&self) -> &Arc<Event> {
        &self.event
    }
}

/// Where an event stands in the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutboxStatus {
    /// Not tried yet, or asked to wait.
    New,
    /// Delivered.
    Done,
    /// Failed, and will be tried again.
    Retry,
    /// Given up.
    Dead,
}

impl OutboxStatus {
    pub(crate) fn of_code(code: i64) -> Self {
        match code {
            0 => Self::New,
            1 => Self::Done,
            2 => Self::Retry,
            _ => Self::Dead,
        }
    }

    #[cfg(feature = "postgres")]
    pub(crate) fn code(self) -> i16 {
        match self {
            Self::New => 0,
            Self::Done => 1,
            Self::Retry => 2,
            Self::Dead => 3,
        }
    }
}

/// One row of the outbox as an operator sees it.
#[derive(Clone, Debug)]
pub struct OutboxRow {
    /// `None` when the row cannot be read as an event; the reason is in `last_error` once it was claimed.
    pub event: Option<Event>,
    /// Where it stands.
    pub status: OutboxStatus,
    /// How often it failed and counted.
    pub attempts: u32,
    /// When it is due, or was.
    pub available_at: DateTime<Utc>,
    /// When it was written, by the database's clock.
    pub created_at: DateTime<Utc>,
    /// When it was delivered or given up.
    pub done_at: Option<DateTime<Utc>>,
    /// Why it last failed.
    pub last_error: Option<String>,
}
