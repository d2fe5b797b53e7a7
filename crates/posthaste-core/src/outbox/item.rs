use std::sync::Arc;

use chrono::{DateTime, Utc};

use crate::Event;
use crate::claims::ClaimToken;

/// A claimed event of an outbox.
#[derive(Clone, Debug)]
pub struct OutboxItem {
    /// The number of its row: its position in the order of insertion.
    pub seq: i64,
    /// When the row was inserted, by the database's clock; for a hot item, by the clock of this process.
    pub created_at: DateTime<Utc>,
    /// The event.
    pub event: Arc<Event>,
    /// The claim under which it is in flight.
    pub(super) token: ClaimToken,
    /// The row is suspected of having crashed a process. Its claim id says that its delivery has started.
    pub(super) is_suspect: bool,
}

impl OutboxItem {
    /// An item of no table, to test a sink by itself.
    pub fn detached(event: Event) -> Self {
        let token = ClaimToken { number: 0, generation: 0 };
        Self { seq: 0, created_at: Utc::now(), event: Arc::new(event), token, is_suspect: false }
    }

    /// The generation of the ownership under which it was claimed; 0 if rows are leased one by one.
    pub fn generation(&self) -> i64 {
        self.token.generation
    }
}
