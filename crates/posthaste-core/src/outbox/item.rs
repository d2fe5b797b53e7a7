use std::sync::Arc;

use chrono::{DateTime, Utc};

use crate::Event;

/// A claimed event.
#[derive(Clone, Debug)]
pub struct OutboxItem {
    /// Its place in the order of insertion.
    pub seq: i64,
    /// Of the ownership under which it was claimed; 0 where rows are leased one by one.
    pub generation: i64,
    /// When it was inserted, by the database's clock; for a hot one, by this process's.
    pub created_at: DateTime<Utc>,
    /// What happened.
    pub event: Arc<Event>,
    /// Of the claim: tells two claims of the same row apart.
    pub(super) ticket: u64,
    /// Suspected of having crashed a process: leased by the lock of a delivery that has started.
    pub(super) is_suspect: bool,
}

impl OutboxItem {
    /// An item of no table, to test a sink by itself.
    pub fn detached(event: Event) -> Self {
        Self { seq: 0, generation: 0, created_at: Utc::now(), event: Arc::new(event), ticket: 0, is_suspect: false }
    }
}
