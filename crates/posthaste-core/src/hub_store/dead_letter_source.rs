use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::{
    DeadLetter, DeadLetterClaimId, DeadLetterClaimRequest, DeadLetterStore, DeadLetterUpdate, NewDeadLetter, Replay,
    Trigger,
};
use crate::event::next_id;
use crate::{Claim, Claimed, Claims, Settled, Settlement, Source, StoreError, Wakeup, lock};

/// The memory that a dead letter needs besides its envelope.
const OVERHEAD_BYTES: usize = 512;

/// The source of dead letters that are due.
///
/// Each dead letter is leased in its own row, because any number of processes may retry. This process also remembers
/// the dead letters that it has in flight, because the leases in the table depend on the wall clock, which can be
/// changed. Clones share their claims.
#[derive(Clone)]
pub struct DeadLetterSource(Arc<Shared>);

struct Shared {
    store: Arc<dyn DeadLetterStore>,
    lease: Duration,
    owner: Arc<str>,
    last_number: AtomicU64,
    in_flight: Mutex<Claims<String, ()>>,
    /// Serializes claims: between reading `in_flight` and adding to it, no other claim may run.
    claiming: tokio::sync::Mutex<()>,
    wakeup: Wakeup,
}

impl DeadLetterSource {
    /// A new owner of claims on this store.
    pub fn new(store: Arc<dyn DeadLetterStore>, lease: Duration) -> Self {
        Self(Arc::new(Shared {
            store,
            lease,
            owner: next_id().into(),
            last_number: AtomicU64::new(0),
            in_flight: Mutex::default(),
            claiming: tokio::sync::Mutex::default(),
            wakeup: Wakeup::default(),
        }))
    }

    /// The table.
    pub fn store(&self) -> &dyn DeadLetterStore {
        &*self.0.store
    }

    /// Inserts dead letters, and wakes the relay.
    pub async fn insert(&self, letters: Vec<NewDeadLetter>) -> Result<(), StoreError> {
        self.0.store.insert(letters).await?;
        self.0.wakeup.wake();
        Ok(())
    }

    /// Replays dead letters, and wakes the relay.
    pub async fn replay(&self, ids: Vec<String>, reason: Option<String>) -> Result<Replay, StoreError> {
        let replay = self.0.store.replay(ids, reason).await?;
        self.0.wakeup.wake();
        Ok(replay)
    }

    fn forget<'a>(&self, letters: impl IntoIterator<Item = &'a DeadLetter>) {
        let mut in_flight = lock(&self.0.in_flight);
        for letter in letters {
            in_flight.remove(&letter.id, letter.claim_id.token());
        }
    }
}

fn claims_of(claimed: &[&Claimed<DeadLetter>]) -> Vec<(String, DeadLetterClaimId)> {
    claimed.iter().map(|claimed| (claimed.item.id.clone(), claimed.item.claim_id.clone())).collect()
}

/// A replay is one attempt, however many attempts were made before.
fn claimed(letter: DeadLetter) -> Claimed<DeadLetter> {
    let (attempt, budget) = match letter.trigger {
        Trigger::Scheduled => (letter.retry_count.saturating_add(1), None),
        Trigger::Replay { .. } => (1, Some(1)),
    };
    let bytes = letter.envelope.len() + OVERHEAD_BYTES;
    Claimed { budget, ..Claimed::new(letter, attempt, bytes) }
}

#[async_trait]
impl Source for DeadLetterSource {
    type Item = DeadLetter;

    async fn claim(&self, limit: usize) -> Result<Claim<DeadLetter>, StoreError> {
        let _one_at_a_time = self.0.claiming.lock().await;
        let started = Instant::now();
        let in_flight = {
            let mut in_flight = lock(&self.0.in_flight);
            in_flight.expire(started, |()| false);
            in_flight.keys().cloned().collect()
        };
        let number = self.0.last_number.fetch_add(1, Ordering::Relaxed) + 1;
        let claim_id = DeadLetterClaimId { owner: self.0.owner.clone(), number };
        let request = DeadLetterClaimRequest { claim_id, lease: self.0.lease, in_flight, limit };
        let found = self.0.store.claim(request).await?;
        let mut in_flight = lock(&self.0.in_flight);
        for letter in &found.letters {
            in_flight.insert(letter.id.clone(), letter.claim_id.token(), started + self.0.lease, ());
        }
        Ok(Claim { items: found.letters.into_iter().map(claimed).collect(), next_due: found.next_due })
    }

    async fn settle(&self, settlements: &[Settlement<'_, DeadLetter>]) -> Result<Vec<Settled>, StoreError> {
        let settled = self.0.store.settle(settlements.iter().map(DeadLetterUpdate::of).collect()).await?;
        let finished = settlements.iter().zip(&settled).filter(|(_, settled)| **settled != Settled::Locked);
        self.forget(finished.map(|(settlement, _)| &settlement.claimed.item));
        Ok(settled)
    }

    async fn renew(&self, claimed: &[&Claimed<DeadLetter>]) -> Result<Vec<Settled>, StoreError> {
        let until = Instant::now() + self.0.lease;
        let renewed = self.0.store.renew(claims_of(claimed), self.0.lease).await?;
        for (claimed, renewed) in claimed.iter().zip(&renewed) {
            let letter = &claimed.item;
            match renewed {
                Settled::Applied => _ = lock(&self.0.in_flight).extend(&letter.id, letter.claim_id.token(), until),
                Settled::LostLease => self.forget([letter]),
                Settled::Locked => {}
            }
        }
        Ok(renewed)
    }

    async fn release(&self, claimed: &[&Claimed<DeadLetter>]) -> Result<(), StoreError> {
        self.0.store.release(claims_of(claimed)).await?;
        self.forget(claimed.iter().map(|claimed| &claimed.item));
        Ok(())
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.0.store.release_all(&self.0.owner).await?;
        lock(&self.0.in_flight).clear();
        Ok(())
    }

    fn lease(&self) -> Duration {
        self.0.lease
    }

    /// False: no code of a user runs in its sink, so nothing can block the renewals.
    fn renews_on_own_thread(&self) -> bool {
        false
    }

    fn wakeup(&self) -> &Wakeup {
        &self.0.wakeup
    }
}

#[cfg(test)]
pub(super) mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::hub_store::DeadLetterFields;

    pub(in crate::hub_store) fn letter(id: &str) -> DeadLetter {
        let text = || id.to_owned();
        let fields = DeadLetterFields {
            delivery_id: text(),
            event_id: text(),
            subscription_id: text(),
            subscriber_id: text(),
            event_type: text(),
            domain: text(),
            endpoint: text(),
            attempts: 4,
            first_failed_at: Default::default(),
        };
        let claim_id = DeadLetterClaimId { owner: "owner".into(), number: 7 };
        DeadLetter { id: text(), fields, trigger: Trigger::Scheduled, envelope: Bytes::new(), retry_count: 2, claim_id }
    }

    #[test]
    fn a_scheduled_retry_continues_the_count_and_a_replay_has_one_attempt() {
        let scheduled = claimed(letter("1"));
        assert_eq!((scheduled.attempt, scheduled.budget), (3, None));
        let trigger = Trigger::Replay { replay_id: "r".to_owned() };
        let replayed = claimed(DeadLetter { trigger, ..letter("1") });
        assert_eq!((replayed.attempt, replayed.budget), (1, Some(1)));
    }
}
