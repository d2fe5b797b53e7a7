use std::collections::HashSet;

use async_trait::async_trait;

use crate::outbox::RowUpdate;
use crate::{Settled, StoreError};

/// Settlements of claimed rows.
#[async_trait]
pub trait SettleStore {
    /// Updates pending rows whose fencing token is one of these, all in one transaction. In single-node mode the tokens
    /// are `owner:generation` of the ownerships under which the rows were claimed; otherwise they are the claim ids in
    /// the rows.
    ///
    /// An updated row is no longer leased. DONE and DEAD set `done_at`; a wait sets `available_at` to `now` plus the
    /// wait; a row that becomes neither DONE nor DEAD loses its `lease_losses`, because an attempt has ended. In
    /// ordered mode, rows that a finished row blocked are unblocked, [`unblock_limit`](super::unblock_limit) of each
    /// key.
    ///
    /// It MUST NOT wait long for a row that another transaction has locked: such a row is left alone and returned as
    /// locked.
    async fn settle(&self, fencing_tokens: &[String], updates: &[RowUpdate]) -> Result<SettledRows, StoreError>;
}

/// The result of updating rows. Rows in neither set are no longer claimed under one of the given tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SettledRows {
    /// These rows were updated.
    pub applied: HashSet<i64>,
    /// These rows are still claimed under one of the tokens, but another transaction has locked them: nothing was
    /// changed.
    pub locked: HashSet<i64>,
}

impl SettledRows {
    /// The result for one row.
    pub fn answer(&self, row: i64) -> Settled {
        match (self.applied.contains(&row), self.locked.contains(&row)) {
            (true, _) => Settled::Applied,
            (false, true) => Settled::Locked,
            (false, false) => Settled::LostLease,
        }
    }
}
