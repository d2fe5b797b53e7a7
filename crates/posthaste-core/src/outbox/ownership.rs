use std::sync::Mutex as StdMutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use super::source::no_answer;
use super::{Owner, Store};
use crate::heartbeat::statement_timeout;
use crate::{StoreError, lock};

/// This process's ownership of the whole table: one leased row, whose generation rises with every change of owner.
pub(super) struct Ownership {
    owner: String,
    lease: Duration,
    /// Locked while the row is refreshed, so that many sources refresh it once.
    refreshing: Mutex<()>,
    /// No source of this process reads the table any more.
    given_up: AtomicBool,
    tenure: StdMutex<Option<Tenure>>,
    /// The source that must claim again in time to refresh the row, and when it last claimed.
    keeper: StdMutex<Option<(String, Instant)>>,
}

#[derive(Clone, Copy)]
struct Tenure {
    generation: i64,
    /// A time before the refreshing statement was sent: the lease ends no earlier than this plus its length.
    refreshed: Instant,
}

impl Ownership {
    pub(super) fn new(owner: String, lease: Duration) -> Self {
        Self {
            owner,
            lease,
            refreshing: Mutex::new(()),
            given_up: AtomicBool::new(false),
            tenure: StdMutex::default(),
            keeper: StdMutex::default(),
        }
    }

    /// The fencing token of rows that were claimed under this generation. It must still be in the owner row when they
    /// are settled.
    pub(super) fn fencing_token(&self, generation: i64) -> String {
        format!("{}:{generation}", self.owner)
    }

    /// How long a claim lasts at least: the owner row may be a tenth of its lease old when a claim is made.
    pub(super) fn dependable_lease(&self) -> Duration {
        self.lease * 9 / 10
    }

    /// Acquires or keeps the ownership. The row is written only if the last refresh is a tenth of the lease ago.
    pub(super) async fn acquire(&self, store: &impl Store) -> Result<Owner, StoreError> {
        if let Some(generation) = self.fresh() {
            return Ok(Owner::Us { generation });
        }
        let _once = self.refreshing.lock().await;
        if let Some(generation) = self.fresh() {
            return Ok(Owner::Us { generation });
        }
        if self.given_up.load(Ordering::Acquire) {
            return Ok(Owner::Other { remaining: self.lease });
        }
        let refreshed = Instant::now();
        let own = store.acquire_ownership(&self.owner, self.lease);
        let owner = timeout(statement_timeout(self.lease), own).await.map_err(no_answer)??;
        self.set(match owner {
            Owner::Us { generation } => Some(Tenure { generation, refreshed }),
            Owner::Other { .. } => None,
        });
        Ok(owner)
    }

    /// True if this source, which claims now, is the one that has to claim again in time to keep the ownership. One of
    /// many sources is enough; when it stops claiming, the next source that claims replaces it.
    pub(super) fn is_kept_by(&self, source: &str) -> bool {
        let (mut keeper, now) = (lock(&self.keeper), Instant::now());
        match &mut *keeper {
            Some((keeper, seen)) if keeper == source => {
                *seen = now;
                true
            }
            Some((_, seen)) if now.duration_since(*seen) < self.lease / 2 => false,
            _ => {
                *keeper = Some((source.to_owned(), now));
                true
            }
        }
    }

    /// This source claims no more. True if another one has to replace it.
    pub(super) fn stop_keeping(&self, source: &str) -> bool {
        lock(&self.keeper).take_if(|(keeper, _)| keeper == source).is_some()
    }

    /// True if this process was the owner at the last refresh.
    pub(super) fn is_ours(&self) -> bool {
        self.tenure().is_some()
    }

    /// The generation, if the row was refreshed less than a tenth of the lease ago.
    pub(super) fn fresh(&self) -> Option<i64> {
        self.tenure().filter(|tenure| tenure.refreshed.elapsed() < self.lease / 10).map(|tenure| tenure.generation)
    }

    fn tenure(&self) -> Option<Tenure> {
        *lock(&self.tenure)
    }

    fn set(&self, tenure: Option<Tenure>) {
        *lock(&self.tenure) = tenure;
    }

    /// A source of this process wants to read the table.
    pub(super) fn request(&self) {
        self.given_up.store(false, Ordering::Release);
    }

    /// Lets another process take over at once.
    pub(super) async fn release(&self, store: &impl Store) -> Result<(), StoreError> {
        let _once = self.refreshing.lock().await;
        self.given_up.store(true, Ordering::Release);
        timeout(statement_timeout(self.lease), store.release_ownership(&self.owner)).await.map_err(no_answer)??;
        self.set(None);
        Ok(())
    }
}
