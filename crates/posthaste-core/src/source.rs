use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::{Disposition, Settled, StoreError, Wakeup};

/// One item that this process may deliver until its lease ends.
#[derive(Clone, Debug)]
pub struct Claimed<T> {
    /// The item.
    pub item: T,
    /// The number of the attempt that this delivery will be, from 1.
    pub attempt: u32,
    /// How many attempts this item has in all, if that differs from the relay's policy.
    pub budget: Option<u32>,
    /// Its size in memory, for the limit on bytes in flight.
    pub bytes: usize,
    /// Its outcome is settled at once, because other items wait for it.
    pub urgent: bool,
    /// Items of one key are delivered one after the other, in the order of the claim; `None` is unordered.
    pub key: Option<Arc<str>>,
}

impl<T> Claimed<T> {
    /// An unordered item with the budget of the policy.
    pub fn new(item: T, attempt: u32, bytes: usize) -> Self {
        Self { item, attempt, budget: None, bytes, urgent: false, key: None }
    }
}

/// The result of a claim.
#[derive(Debug)]
pub struct Claim<T> {
    /// In the order of delivery.
    pub items: Vec<Claimed<T>>,
    /// If there are fewer items than the limit: how long until the next known item is due. A hint, not a promise.
    pub next_due: Option<Duration>,
}

impl<T> Default for Claim<T> {
    fn default() -> Self {
        Self { items: Vec::new(), next_due: None }
    }
}

/// One claimed item, with what follows from its outcome.
pub struct Settlement<'a, T> {
    /// The item.
    pub claimed: &'a Claimed<T>,
    /// What the source must store.
    pub disposition: &'a Disposition,
    /// How long the attempt took.
    pub took: Duration,
}

/// Claims items, and settles them.
///
/// # Laws
///
/// Each law is a test of that name in `posthaste-backend-tests`; a new source is correct when the suite passes.
///
/// - `claim_never_returns_an_item_twice_within_a_lease`: an item claimed and neither settled nor released MUST NOT be
///   claimable, by any process, before its lease ends.
/// - `claim_returns_items_in_order`: due items come in the order in which they became due, ties in insertion order.
/// - `claim_respects_the_limit_and_the_due_time`.
/// - `an_expired_lease_is_claimable_again`, and expiry MUST NOT change the item's attempts.
/// - `settle_by_a_stale_owner_is_lost_lease`: settling an item after its claim was lost changes nothing and returns
///   [`Settled::LostLease`].
/// - `settle_twice_is_lost_lease`: the second settlement of one claim changes nothing.
/// - `leases_are_renewed`: a renewed item stays claimed for a whole lease from the renewal.
/// - `a_released_item_is_claimable_at_once`, uncounted.
/// - `a_counted_retry_counts_and_waits`, `an_uncounted_retry_waits_only`.
/// - `dead_is_not_claimable`, `done_is_not_claimable`.
///
/// For items with a key, also `a_key_is_claimed_by_one_owner_at_a_time`, `a_waiting_head_blocks_its_key_only` and
/// `a_key_keeps_its_order_through_retries`.
#[async_trait]
pub trait Source: Send + Sync + 'static {
    /// The type of the items.
    type Item: Send + Sync + 'static;

    /// Claims at most `limit` due items for one lease, which starts no earlier than this call.
    async fn claim(&self, limit: usize) -> Result<Claim<Self::Item>, StoreError>;

    /// Settles items, all in one transaction. Returns the results in the same order.
    async fn settle(&self, settlements: &[Settlement<'_, Self::Item>]) -> Result<Vec<Settled>, StoreError>;

    /// Renews the lease of each item. Returns the results in the same order.
    async fn renew(&self, claimed: &[&Claimed<Self::Item>]) -> Result<Vec<Settled>, StoreError>;

    /// Releases items that were not delivered, uncounted. Items whose claim was lost are left alone.
    async fn release(&self, claimed: &[&Claimed<Self::Item>]) -> Result<(), StoreError>;

    /// Called once, after the last release: gives up everything else that keeps other processes from claiming.
    async fn close(&self) -> Result<(), StoreError>;

    /// How long a claim lasts without a renewal.
    fn lease(&self) -> Duration;

    /// True if [`renew`](Self::renew) may run on a thread and a runtime of its own, where no listener can delay it.
    /// False for a source on the clock of a test.
    fn renews_on_own_thread(&self) -> bool;

    /// Signalled when there may be something to claim.
    fn wakeup(&self) -> &Wakeup;

    /// True if the delivery of this item may start. False if the item is revoked: another process will get it, and then
    /// it must be released if its delivery has not started.
    fn may_start(&self, claimed: &Claimed<Self::Item>) -> bool;

    /// Waits until items are revoked. Never returns if this source revokes none.
    async fn revoked(&self);
}

/// Lets a relay run on a source whose type is not known.
#[async_trait]
impl<T: Send + Sync + 'static> Source for Arc<dyn Source<Item = T>> {
    type Item = T;

    async fn claim(&self, limit: usize) -> Result<Claim<T>, StoreError> {
        (**self).claim(limit).await
    }

    async fn settle(&self, settlements: &[Settlement<'_, T>]) -> Result<Vec<Settled>, StoreError> {
        (**self).settle(settlements).await
    }

    async fn renew(&self, claimed: &[&Claimed<T>]) -> Result<Vec<Settled>, StoreError> {
        (**self).renew(claimed).await
    }

    async fn release(&self, claimed: &[&Claimed<T>]) -> Result<(), StoreError> {
        (**self).release(claimed).await
    }

    async fn close(&self) -> Result<(), StoreError> {
        (**self).close().await
    }

    fn lease(&self) -> Duration {
        (**self).lease()
    }

    fn renews_on_own_thread(&self) -> bool {
        (**self).renews_on_own_thread()
    }

    fn wakeup(&self) -> &Wakeup {
        (**self).wakeup()
    }

    fn may_start(&self, claimed: &Claimed<T>) -> bool {
        (**self).may_start(claimed)
    }

    async fn revoked(&self) {
        (**self).revoked().await;
    }
}
