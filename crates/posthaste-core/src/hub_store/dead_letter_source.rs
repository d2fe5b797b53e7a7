use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::dead_letter_room::{ClaimedLoad, shares};
use super::{
    DeadLetter, DeadLetterClaimId, DeadLetterClaimRequest, DeadLetterRoom, DeadLetterStore, DeadLetterUpdate,
    NewDeadLetter, Replay, Trigger, Unlimited, WaitingSubscription,
};
use crate::event::next_id;
use crate::{Claim, Claimed, Claims, Settled, Settlement, Source, StoreError, Wakeup, lock};

/// The memory that a dead letter needs besides its envelope.
const OVERHEAD_BYTES: usize = 512;

/// A look at the dead letters costs time for each subscription that has some. After a look that took longer than
/// `SHORT_LOOK` and found nothing to claim, the next one comes so much later that looks take about one part in
/// `LOOK_PART` of the time, but not later than `LONGEST_REST`.
const SHORT_LOOK: Duration = Duration::from_millis(1);
const LOOK_PART: u32 = 100;
const LONGEST_REST: Duration = Duration::from_millis(500);
/// How many dead letters one claim of a hub brings at most. Other writes wait meanwhile.
const MOST_AT_ONCE: usize = 100;

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
    looks: AtomicU64,
    in_flight: Mutex<Claims<String, InFlight>>,
    room: Arc<dyn DeadLetterRoom>,
    /// It claims few at a time, and rests after long looks, because others use the same database.
    is_gentle: bool,
    /// Serializes claims: between reading `in_flight` and adding to it, no other claim may run.
    claiming: tokio::sync::Mutex<Claiming>,
    wakeup: Wakeup,
}

#[derive(Default)]
struct Claiming {
    /// The subscription that was claimed last.
    last: String,
    /// When to look for dead letters again.
    next_look: Option<Instant>,
}

/// A claimed dead letter.
struct InFlight {
    subscription_id: String,
    bytes: usize,
}

impl DeadLetterSource {
    /// A new owner of claims on this store, which claims every dead letter that is due.
    pub fn new(store: Arc<dyn DeadLetterStore>, lease: Duration) -> Self {
        Self::build(store, lease, Arc::new(Unlimited), false, Wakeup::default())
    }

    /// The same, which claims only what can be sent, few at a time, and rests after long looks at the table. `wakeup`
    /// wakes its relay when there is room for more.
    pub fn with_room(
        store: Arc<dyn DeadLetterStore>,
        lease: Duration,
        room: Arc<dyn DeadLetterRoom>,
        wakeup: Wakeup,
    ) -> Self {
        Self::build(store, lease, room, true, wakeup)
    }

    fn build(
        store: Arc<dyn DeadLetterStore>,
        lease: Duration,
        room: Arc<dyn DeadLetterRoom>,
        is_gentle: bool,
        wakeup: Wakeup,
    ) -> Self {
        Self(Arc::new(Shared {
            store,
            lease,
            owner: next_id().into(),
            last_number: AtomicU64::new(0),
            looks: AtomicU64::new(0),
            in_flight: Mutex::default(),
            room,
            is_gentle,
            claiming: tokio::sync::Mutex::default(),
            wakeup,
        }))
    }

    /// The table.
    pub fn store(&self) -> &dyn DeadLetterStore {
        &*self.0.store
    }

    /// How often it has looked for dead letters that are due and can be sent.
    pub fn looks(&self) -> u64 {
        self.0.looks.load(Ordering::Relaxed)
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
        self.0.room.end_holds();
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

/// How long until the next dead letter is due. Those that are due and were not claimed cannot be sent now; the relay is
/// woken when they can.
fn next_due_of(waiting: &[WaitingSubscription]) -> Option<Duration> {
    waiting.iter().map(|waiting| waiting.due_in).filter(|due_in| !due_in.is_zero()).min()
}

fn earliest(one: Option<Duration>, other: Option<Duration>) -> Option<Duration> {
    one.into_iter().chain(other).min()
}

fn bytes_of(letter: &DeadLetter) -> usize {
    letter.envelope.len() + OVERHEAD_BYTES
}

/// A replay is one attempt, however many attempts were made before.
fn claimed(letter: DeadLetter) -> Claimed<DeadLetter> {
    let (attempt, budget) = match letter.trigger {
        Trigger::Scheduled => (letter.retry_count.saturating_add(1), None),
        Trigger::Replay { .. } => (1, Some(1)),
    };
    let bytes = bytes_of(&letter);
    Claimed { budget, ..Claimed::new(letter, attempt, bytes) }
}

#[async_trait]
impl Source for DeadLetterSource {
    type Item = DeadLetter;

    async fn claim(&self, limit: usize) -> Result<Claim<DeadLetter>, StoreError> {
        let limit = if self.0.is_gentle { limit.min(MOST_AT_ONCE) } else { limit };
        let mut claiming = self.0.claiming.lock().await;
        let started = Instant::now();
        if let Some(next_look) = claiming.next_look.filter(|next_look| *next_look > started) {
            return Ok(Claim { items: Vec::new(), next_due: Some(next_look - started) });
        }
        let (mut ids, mut in_memory) = (Vec::new(), ClaimedLoad::default());
        {
            let mut in_flight = lock(&self.0.in_flight);
            in_flight.expire(started, |_| false);
            for (id, letter) in in_flight.iter() {
                ids.push(id.clone());
                in_memory.add(&letter.subscription_id, letter.bytes);
            }
        }
        let waiting = self.0.store.waiting(ids.clone()).await?;
        let took = started.elapsed();
        self.0.looks.fetch_add(1, Ordering::Relaxed);
        let shares = shares(&waiting, &*self.0.room, &in_memory, &claiming.last, limit);
        let next_due = earliest(next_due_of(&waiting), shares.next_room);
        let subscriptions = shares.by_subscription;
        let Some((newest, _)) = subscriptions.last() else {
            let rests = self.0.is_gentle && took > SHORT_LOOK;
            claiming.next_look = rests.then(|| Instant::now() + (took * LOOK_PART).min(LONGEST_REST));
            return Ok(Claim { items: Vec::new(), next_due });
        };
        claiming.last = newest.clone();
        let number = self.0.last_number.fetch_add(1, Ordering::Relaxed) + 1;
        let claim_id = DeadLetterClaimId { owner: self.0.owner.clone(), number };
        let request = DeadLetterClaimRequest { claim_id, lease: self.0.lease, in_flight: ids, subscriptions };
        let letters = self.0.store.claim(request).await?;
        for letter in &letters {
            let in_flight =
                InFlight { subscription_id: letter.fields.subscription_id.clone(), bytes: bytes_of(letter) };
            let until = started + self.0.lease;
            lock(&self.0.in_flight).insert(letter.id.clone(), letter.claim_id.token(), until, in_flight);
        }
        // The next look shows when the others of these subscriptions are due.
        Ok(Claim { items: letters.into_iter().map(claimed).collect(), next_due: Some(Duration::ZERO) })
    }

    async fn settle(&self, settlements: &[Settlement<'_, DeadLetter>]) -> Result<Vec<Settled>, StoreError> {
        let settled = self.0.store.settle(settlements.iter().map(DeadLetterUpdate::of).collect()).await?;
        let finished = settlements.iter().zip(&settled).filter(|(_, settled)| **settled != Settled::Locked);
        self.forget(finished.map(|(settlement, _)| &settlement.claimed.item));
        // There may be room for other dead letters of these subscriptions now.
        self.0.wakeup.wake();
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

    fn may_start(&self, _: &Claimed<DeadLetter>) -> bool {
        true
    }

    async fn revoked(&self) {
        std::future::pending().await
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
