use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::OutboxItem;
use crate::claims::{ClaimToken, Claims};
use crate::lock;

/// The rows of an outbox table that this process has claimed and not settled.
#[derive(Default)]
pub(super) struct RowClaims(Mutex<State>);

#[derive(Default)]
struct State {
    claims: Claims<i64, RowClaim>,
    last_number: u64,
    /// While a claim runs: the rows that were settled or released since it began. The claim may have read them as they
    /// were before that.
    freed_during_claim: Option<HashSet<i64>>,
}

struct RowClaim {
    /// The row is being settled: its claim must not expire before that is finished.
    is_settling: bool,
    /// Suspects only: shared by all suspects of one claim, and free again when the last of them is removed.
    permit: Option<Arc<OwnedSemaphorePermit>>,
}

impl RowClaims {
    /// The number of a new claim.
    pub(super) fn next_number(&self) -> u64 {
        let mut state = lock(&self.0);
        state.last_number += 1;
        state.last_number
    }

    /// Begins a claim; one runs at a time. Returns the rows that it must leave out. Removes claims that have expired,
    /// and those of an earlier ownership.
    pub(super) fn begin_claim(&self, generation: i64, now: Instant) -> Vec<i64> {
        let mut state = lock(&self.0);
        state.claims.retain(|_, token, _| token.generation == generation);
        state.claims.expire(now, |claim| claim.is_settling);
        state.freed_during_claim = Some(HashSet::new());
        state.claims.keys().copied().collect()
    }

    /// True if a row that the running claim has read was claimed by another path since the claim began: it may be
    /// settled by now.
    pub(super) fn was_claimed_meanwhile(&self, seq: i64) -> bool {
        let state = lock(&self.0);
        state.claims.contains(&seq) || state.freed_during_claim.as_ref().is_some_and(|freed| freed.contains(&seq))
    }

    pub(super) fn end_claim(&self) {
        lock(&self.0).freed_during_claim = None;
    }

    pub(super) fn insert(
        &self,
        seq: i64,
        token: ClaimToken,
        until: Instant,
        permit: Option<Arc<OwnedSemaphorePermit>>,
    ) {
        lock(&self.0).claims.insert(seq, token, until, RowClaim { is_settling: false, permit });
    }

    pub(super) fn contains(&self, item: &OutboxItem) -> bool {
        lock(&self.0).claims.get(&item.seq, item.token).is_some()
    }

    /// Extends the claim of an item whose lease was renewed under this generation. False if the claim is gone.
    pub(super) fn extend(&self, item: &OutboxItem, generation: i64, until: Instant) -> bool {
        item.token.generation == generation && lock(&self.0).claims.extend(&item.seq, item.token, until)
    }

    /// Removes the claim of an item. True if a permit for suspects became free.
    pub(super) fn remove(&self, item: &OutboxItem) -> bool {
        let mut state = lock(&self.0);
        let Some(claim) = state.claims.remove(&item.seq, item.token) else { return false };
        if let Some(freed) = &mut state.freed_during_claim {
            freed.insert(item.seq);
        }
        claim.permit.is_some_and(|permit| Arc::into_inner(permit).is_some())
    }

    /// Keeps the claims of these items from expiring while they are settled. Leaves out items whose claim is gone.
    pub(super) fn settling<'a>(&'a self, items: impl Iterator<Item = &'a OutboxItem>) -> Settling<'a> {
        let mut state = lock(&self.0);
        let mut ours = Vec::new();
        for item in items {
            // An item that occurs twice in one settlement is settled by the first.
            if let Some(claim) = state.claims.get_mut(&item.seq, item.token).filter(|claim| !claim.is_settling) {
                claim.is_settling = true;
                ours.push(item);
            }
        }
        Settling { claims: self, items: ours }
    }
}

/// Items that are being settled. If this is dropped before the result is known, they stay claimed.
pub(super) struct Settling<'a> {
    claims: &'a RowClaims,
    items: Vec<&'a OutboxItem>,
}

impl<'a> Settling<'a> {
    /// The items whose claims exist, in the order in which they were given.
    pub(super) fn items(&self) -> &[&'a OutboxItem] {
        &self.items
    }

    /// Removes the claims, except of rows that are `locked` and so not settled. True if a permit for suspects became
    /// free.
    pub(super) fn finish(self, locked: &HashSet<i64>) -> bool {
        let mut is_permit_free = false;
        for item in self.items.iter().filter(|item| !locked.contains(&item.seq)) {
            is_permit_free |= self.claims.remove(item);
        }
        is_permit_free
    }
}

impl Drop for Settling<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.claims.0);
        for item in &self.items {
            if let Some(claim) = state.claims.get_mut(&item.seq, item.token) {
                claim.is_settling = false;
            }
        }
    }
}
