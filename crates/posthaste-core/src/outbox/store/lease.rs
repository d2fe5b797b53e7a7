use std::collections::HashSet;

use async_trait::async_trait;

use super::SettledRows;
use crate::StoreError;

/// The leases of claimed rows, in the modes that lease rows.
///
/// No method may wait long for a row that another transaction has locked.
#[async_trait]
pub trait LeaseStore {
    /// Starts the leases of these rows anew, where one of the claim ids still holds them.
    async fn renew(&self, claim_ids: &[String], rows: &[i64]) -> Result<SettledRows, StoreError>;

    /// Ends leases as if they had never been, where one of the claim ids still holds them. Returns the rows that are known to
    /// exist, released or not.
    async fn release(&self, leases: &LeaseSet<'_>) -> Result<HashSet<i64>, StoreError>;

    /// Suspects that were just claimed are about to be delivered: replaces their claim id by one that ends with
    /// [`STARTED`](crate::outbox::STARTED), where they are still leased by the first one. Returns those rows.
    async fn mark_started(
        &self,
        claim_id: &str,
        started_claim_id: &str,
        rows: &[i64],
    ) -> Result<HashSet<i64>, StoreError>;
}

/// Which leases are to be released.
#[derive(Clone, Copy, Debug)]
pub enum LeaseSet<'a> {
    /// Those of these rows.
    Rows {
        /// The claim ids that may hold them.
        claim_ids: &'a [String],
        /// The numbers of the rows.
        rows: &'a [i64],
    },
    /// Those of the rows of these events.
    Events {
        /// The claim ids that may hold them.
        claim_ids: &'a [String],
        /// The ids of the events.
        ids: &'a [String],
    },
    /// All that these claim ids hold, as far as they are found among the first
    /// [`LOST_CLAIM_SCAN`](super::LOST_CLAIM_SCAN) due rows.
    Claims {
        /// The claim ids.
        claim_ids: &'a [String],
    },
}
