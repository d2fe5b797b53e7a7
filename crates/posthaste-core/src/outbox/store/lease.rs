use std::collections::HashSet;

use async_trait::async_trait;

use super::SettledRows;
use crate::StoreError;

/// The leases of claimed rows, in the modes that lease rows.
///
/// No method may wait long for a row that another transaction has locked.
#[async_trait]
pub trait LeaseStore {
    /// Renews the leases of those of these rows that still have one of the claim ids.
    async fn renew(&self, claim_ids: &[String], rows: &[i64]) -> Result<SettledRows, StoreError>;

    /// Ends the leases of rows that still have one of the claim ids, as if they had never been leased. `applied` are the
    /// rows that exist and have none of the claim ids now, whether or not they had one before.
    async fn release(&self, leases: &LeaseSet<'_>) -> Result<SettledRows, StoreError>;

    /// Marks suspects that are about to be delivered: if they still have `claim_id`, replaces it by one that ends with
    /// [`STARTED`](crate::outbox::STARTED). Returns the marked rows.
    async fn mark_started(
        &self,
        claim_id: &str,
        started_claim_id: &str,
        rows: &[i64],
    ) -> Result<HashSet<i64>, StoreError>;
}

/// The leases to release.
#[derive(Clone, Copy, Debug)]
pub enum LeaseSet<'a> {
    /// The leases of these rows.
    Rows {
        /// The claim ids that the rows may have.
        claim_ids: &'a [String],
        /// The numbers of the rows.
        rows: &'a [i64],
    },
    /// The leases of the rows of these events.
    Events {
        /// The claim ids that the rows may have.
        claim_ids: &'a [String],
        /// The ids of the events.
        ids: &'a [String],
    },
    /// All leases with these claim ids that are found among the first [`LOST_CLAIM_SCAN`](super::LOST_CLAIM_SCAN) due
    /// rows.
    Claims {
        /// The claim ids.
        claim_ids: &'a [String],
    },
}
