use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::{Claim, Claimed, Disposition, Settled, Settlement, Source, StoreError, Wakeup, lock};

use crate::attempt_log::{AttemptLog, Described};

/// The progress of a relay, for readiness.
#[derive(Default)]
pub(crate) struct RelayProgress {
    settled: AtomicU64,
    completed: AtomicU64,
    /// Why the last attempt failed, if a dependency was the reason.
    held_back: Mutex<Option<String>>,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Counts {
    /// Attempts whose outcome is recorded.
    pub(crate) settled: u64,
    /// The recorded attempts that count: delivered, dead, or failed because of the item itself.
    pub(crate) completed: u64,
}

impl RelayProgress {
    pub(crate) fn counts(&self) -> Counts {
        Counts { settled: self.settled.load(Ordering::Relaxed), completed: self.completed.load(Ordering::Relaxed) }
    }

    /// Why the last attempt failed, if a dependency was the reason.
    pub(crate) fn held_back(&self) -> Option<String> {
        lock(&self.held_back).clone()
    }

    /// No item waits, also none that failed because of a dependency: another process may have delivered it.
    fn nothing_waits(&self) {
        *lock(&self.held_back) = None;
    }

    fn settled(&self, disposition: &Disposition) {
        self.settled.fetch_add(1, Ordering::Relaxed);
        match disposition {
            Disposition::Retry { counted: false, failure, .. } => {
                // A snooze says nothing about a dependency.
                if let Some(failure) = failure {
                    *lock(&self.held_back) = Some(failure.to_string());
                }
            }
            _ => {
                self.completed.fetch_add(1, Ordering::Relaxed);
                *lock(&self.held_back) = None;
            }
        }
    }
}

/// A source whose settlements are counted for readiness. Failed attempts are logged.
pub(crate) struct Watched<S> {
    relay: Arc<str>,
    source: S,
    progress: Arc<RelayProgress>,
    log: Arc<AttemptLog>,
}

impl<S> Watched<S> {
    pub(crate) fn new(relay: Arc<str>, source: S, progress: Arc<RelayProgress>, log: Arc<AttemptLog>) -> Self {
        Self { relay, source, progress, log }
    }
}

#[async_trait]
impl<S: Source<Item: Described>> Source for Watched<S> {
    type Item = S::Item;

    async fn claim(&self, limit: usize) -> Result<Claim<S::Item>, StoreError> {
        let claimed = self.source.claim(limit).await;
        if claimed.as_ref().is_ok_and(|claim| claim.items.is_empty() && claim.next_due.is_none()) {
            self.progress.nothing_waits();
        }
        claimed
    }

    async fn settle(&self, settlements: &[Settlement<'_, S::Item>]) -> Result<Vec<Settled>, StoreError> {
        let settled = self.source.settle(settlements).await?;
        for (settlement, settled) in settlements.iter().zip(&settled) {
            if *settled == Settled::Applied {
                self.progress.settled(settlement.disposition);
                self.log.settled(&self.relay, settlement.claimed, settlement.disposition);
            }
        }
        Ok(settled)
    }

    async fn renew(&self, claimed: &[&Claimed<S::Item>]) -> Result<Vec<Settled>, StoreError> {
        self.source.renew(claimed).await
    }

    async fn release(&self, claimed: &[&Claimed<S::Item>]) -> Result<(), StoreError> {
        self.source.release(claimed).await
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.source.close().await
    }

    fn lease(&self) -> Duration {
        self.source.lease()
    }

    fn renews_on_own_thread(&self) -> bool {
        self.source.renews_on_own_thread()
    }

    fn wakeup(&self) -> &Wakeup {
        self.source.wakeup()
    }

    fn may_start(&self, claimed: &Claimed<S::Item>) -> bool {
        self.source.may_start(claimed)
    }

    async fn revoked(&self) {
        self.source.revoked().await;
    }
}
