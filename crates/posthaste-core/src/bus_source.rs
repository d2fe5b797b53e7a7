mod undecoded;
mod waiting;

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::time::Instant;

use self::undecoded::Undecoded;
use self::waiting::Waiting;
use crate::bus::{Bus, Consumer, Fetched, Poison, Position, PublishError, Quarantine, Record};
use crate::{
    Claim, Claimed, Disposition, Failure, FailureClass, Load, Settled, Settlement, Source, StoreError, Wakeup, lock,
    metric_names, parts,
};

/// How many dead letters are published at once. Other records wait meanwhile.
const PUBLISHED_AT_ONCE: Load = Load { items: 100, bytes: 2 * 1024 * 1024 };

/// A bus as a [`Source`]: it claims the records that a group has not acked, and acks a record when it is settled.
///
/// Retries stay in memory: the record is unacked and due again later. Three kinds of records are published to their
/// dead-letter topic and acked after that publish is durable: a dead record, a record whose retry is too far away to
/// wait in memory, and a record whose attempt could not be made. An unreadable record is quarantined before its ack, and
/// so is a record whose dead letter the bus refuses.
pub struct BusSource<T> {
    group: String,
    bus: Arc<dyn Bus>,
    consumer: Box<dyn Consumer>,
    quarantine: Arc<dyn Quarantine>,
    options: BusSourceOptions<T>,
    waiting: Mutex<Waiting<T>>,
    /// Locked by claims only, which run one at a time.
    undecoded: tokio::sync::Mutex<Undecoded>,
    /// Unreadable records that are not in the quarantine yet; the consumer hands them out only once.
    unreadable: Mutex<Vec<Poison>>,
}

/// Decodes one record.
pub type Decode<T> = Box<dyn for<'a> Fn(&'a Fetched) -> BoxFuture<'a, Result<Decoded<T>, DecodeError>> + Send + Sync>;
type DeadLetter<T> =
    Box<dyn for<'a> Fn(&'a BusItem<T>, &'a GivenUp) -> BoxFuture<'a, Result<Record, StoreError>> + Send + Sync>;

/// Why a record is not decoded.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The record can never be decoded. It is quarantined, and an operator sees this reason.
    #[error("{0}")]
    Poison(String),
    /// The record cannot be decoded now, because a dependency does not respond. It is decoded again later, for ever.
    #[error("{}", .0.chain())]
    Outage(StoreError),
}

/// The options of one group's source.
pub struct BusSourceOptions<T> {
    /// Decodes a record. During an outage it must fail fast: the records are decoded one after the other.
    pub decode: Decode<T>,
    /// Builds the dead-letter record of an item. `None` if the group has no dead-letter topic: then a dead item is
    /// quarantined.
    pub dead_letter: Option<DeadLetter<T>>,
    /// An item whose next attempt is further away than this is deferred to the dead-letter topic.
    pub defer_after: Duration,
    /// What may wait in memory for a retry. At this limit no more are fetched. With a dead-letter topic, retries that
    /// exceed the share of their key are deferred to it.
    pub max_waiting: Load,
}

/// Why an item becomes a dead letter.
pub struct GivenUp {
    /// How many attempts were made.
    pub attempts: u32,
    /// Why the last of them failed, or why none was made.
    pub failure: Failure,
    /// It has attempts left, and must not wait for them in memory.
    pub is_deferred: bool,
}

impl GivenUp {
    /// An outage means that the attempt could not be made, so it does not count. The operator sees why the last attempt
    /// that was made failed.
    fn of<T>(claimed: &Claimed<BusItem<T>>, failure: &Failure, is_deferred: bool) -> Self {
        let is_outage = failure.class == FailureClass::Outage;
        let attempts = claimed.attempt - u32::from(is_outage);
        let failure = match claimed.item.last_failure.as_deref().filter(|_| is_outage) {
            Some(last) => {
                let causes: Vec<String> = last.cause.iter().cloned().chain([failure.to_string()]).collect();
                last.clone().cause(causes.join("; "))
            }
            None => failure.clone(),
        };
        Self { attempts, failure, is_deferred }
    }
}

/// A decoded record.
pub struct Decoded<T> {
    /// The decoded value.
    pub value: T,
    /// How many attempts the record has, if it sets its own limit.
    pub budget: Option<u32>,
    /// Records with the same key share the room for waiting retries, so that one key leaves room for the others.
    pub fair_key: Option<Arc<str>>,
}

/// One claimed record.
pub struct BusItem<T> {
    /// The decoded value.
    pub value: Arc<T>,
    /// The position of the record.
    pub position: Position,
    /// The record as it was read, for the quarantine. A group with a dead-letter topic does not need it.
    record: Option<Arc<Fetched>>,
    fair_key: Option<Arc<str>>,
    /// When the first attempt failed.
    pub first_failed_at: Option<DateTime<Utc>>,
    /// Why the last attempt failed.
    last_failure: Option<Arc<Failure>>,
}

impl<T> Clone for BusItem<T> {
    fn clone(&self) -> Self {
        Self {
            value: self.value.clone(),
            position: self.position.clone(),
            record: self.record.clone(),
            fair_key: self.fair_key.clone(),
            first_failed_at: self.first_failed_at,
            last_failure: self.last_failure.clone(),
        }
    }
}

impl<T: Send + Sync + 'static> BusSource<T> {
    /// Reads the records that the consumer of this group fetches, and publishes dead letters to the bus.
    pub fn new(
        group: impl Into<String>,
        bus: Arc<dyn Bus>,
        consumer: Box<dyn Consumer>,
        quarantine: Arc<dyn Quarantine>,
        options: BusSourceOptions<T>,
    ) -> Self {
        Self {
            group: group.into(),
            bus,
            consumer,
            quarantine,
            waiting: Mutex::new(Waiting::new(options.max_waiting)),
            undecoded: tokio::sync::Mutex::default(),
            unreadable: Mutex::default(),
            options,
        }
    }

    /// Due retries whose partition is still leased by this consumer.
    async fn due_again(&self, limit: usize) -> Result<Kept<'_, T>, StoreError> {
        let mut due = Kept { source: self, items: lock(&self.waiting).take_due(Instant::now(), limit) };
        if !due.items.is_empty() {
            // The relay does not renew the leases of records that wait for a retry.
            let positions: Vec<_> = due.items.iter().map(|claimed| &claimed.item.position).collect();
            let renewed = self.consumer.renew(&positions).await?;
            let mut renewed = renewed.into_iter();
            due.items.retain(|_| renewed.next() != Some(Settled::LostLease));
        }
        Ok(due)
    }

    /// Keeps items in memory for a retry, each with its delay. Revoked items are given up: another consumer reads them.
    fn keep(&self, items: impl IntoIterator<Item = (Duration, Claimed<BusItem<T>>)>) {
        let is_kept = |(_, claimed): &(Duration, Claimed<BusItem<T>>)| self.consumer.may_start(&claimed.item.position);
        let (kept, revoked): (Vec<_>, Vec<_>) = items.into_iter().partition(is_kept);
        let mut waiting = lock(&self.waiting);
        kept.into_iter().for_each(|(delay, claimed)| waiting.put(delay, claimed));
        drop(waiting);
        self.give_up(revoked.iter().map(|(_, claimed)| &claimed.item.position));
    }

    fn give_up<'a>(&self, revoked: impl Iterator<Item = &'a Position>) {
        let positions: Vec<&Position> = revoked.collect();
        if !positions.is_empty() {
            self.consumer.release(&positions);
        }
    }

    /// Gives up the revoked records that wait for a retry or to be decoded.
    fn give_up_revoked(&self) {
        let revoked = lock(&self.waiting).take_revoked(|item| !self.consumer.may_start(&item.position));
        self.give_up(revoked.iter().map(|claimed| &claimed.item.position));
        // A claim that decodes at this moment gives them up itself.
        if let Ok(mut undecoded) = self.undecoded.try_lock() {
            self.give_up_undecoded(&mut undecoded);
        }
    }

    fn give_up_undecoded(&self, undecoded: &mut Undecoded) {
        let revoked = undecoded.take_revoked(|position| !self.consumer.may_start(position));
        self.give_up(revoked.iter().map(|record| &record.position));
    }

    /// Fetches and decodes records. Returns the items, and when there may be more: at once after a full fetch, and later
    /// if records have to be decoded again.
    async fn fetch(&self, limit: usize) -> Result<(Vec<Claimed<BusItem<T>>>, Option<Duration>), StoreError> {
        let mut undecoded = self.undecoded.lock().await;
        if undecoded.retry_postponed(Instant::now()) {
            // The relay does not renew the leases of records that are not decoded.
            self.consumer.renew(&[]).await?;
        }
        self.give_up_undecoded(&mut undecoded);
        let mut full = false;
        if undecoded.is_decoded() && self.has_room(undecoded.load()) {
            let records = self.consumer.fetch(limit).await?;
            full = records.len() >= limit;
            undecoded.push(records);
        }
        let mut items = Vec::new();
        // A record stays in the list until it is decoded, so that a cancelled claim loses none.
        while items.len() < limit
            && let Some(record) = undecoded.next()
        {
            match self.decode(record).await {
                Ok(decoded) => items.extend(undecoded.take().map(|record| self.item(record, decoded))),
                Err(DecodeError::Poison(reason)) => {
                    lock(&self.unreadable).extend(undecoded.take().map(|record| Poison { record, reason }));
                }
                Err(DecodeError::Outage(error)) => undecoded.postpone(&self.group, &error),
            }
        }
        let more = if full || !undecoded.is_decoded() { Some(Duration::ZERO) } else { undecoded.next_try() };
        Ok((items, more))
    }

    /// True if more may be fetched while this much is not decoded. Unreadable records count too: while they cannot be
    /// quarantined, they stay in memory.
    fn has_room(&self, undecoded: Load) -> bool {
        let unreadable = lock(&self.unreadable);
        let mut load = undecoded;
        unreadable.iter().for_each(|poison| load += Load::one(poison.record.size()));
        load.is_within(self.options.max_waiting)
    }

    async fn decode(&self, record: &Fetched) -> Result<Decoded<T>, DecodeError> {
        if let Some(damage) = &record.damage {
            return Err(DecodeError::Poison(damage.clone()));
        }
        // A decoder that panics must not lose the other records of the fetch.
        let decoding = AssertUnwindSafe(async { (self.options.decode)(record).await }).catch_unwind();
        decoding.await.unwrap_or_else(|_| Err(DecodeError::Poison("its decoder panicked".to_owned())))
    }

    fn item(&self, record: Fetched, decoded: Decoded<T>) -> Claimed<BusItem<T>> {
        let bytes = record.size();
        let item = BusItem {
            value: Arc::new(decoded.value),
            position: record.position.clone(),
            record: self.options.dead_letter.is_none().then(|| Arc::new(record)),
            fair_key: decoded.fair_key,
            first_failed_at: None,
            last_failure: None,
        };
        Claimed { budget: decoded.budget, ..Claimed::new(item, 1, bytes) }
    }

    /// Quarantines and acks the unreadable records. If that fails, the next claim tries again. Returns true if none is
    /// left.
    async fn isolate(&self) -> bool {
        // The records stay in the list until that is done, even if this call fails or is cancelled. Claims run one at a
        // time, so the list still starts with these records afterwards.
        let poison = lock(&self.unreadable).clone();
        if poison.is_empty() {
            return true;
        }
        match self.quarantine_and_ack(&poison).await {
            Ok(settled) => {
                let mut settled = settled.into_iter();
                let mut unreadable = lock(&self.unreadable);
                unreadable.retain(|_| matches!(settled.next(), None | Some(Settled::Locked)));
                unreadable.is_empty()
            }
            Err(error) => {
                tracing::error!(
                    group = self.group,
                    error = error.chain(),
                    "failed to quarantine unreadable records: their partitions make no progress; trying again"
                );
                false
            }
        }
    }

    async fn quarantine_and_ack(&self, poison: &[Poison]) -> Result<Vec<Settled>, StoreError> {
        self.store_poison(poison).await?;
        let positions: Vec<_> = poison.iter().map(|poison| &poison.record.position).collect();
        self.consumer.ack(&positions).await
    }

    /// Quarantines records. The caller acks them afterwards.
    async fn store_poison(&self, poison: &[Poison]) -> Result<(), StoreError> {
        for Poison { record, reason } in poison {
            tracing::error!(
                group = self.group,
                topic = %record.position.topic,
                partition = record.position.partition,
                offset = record.position.offset,
                reason,
                "a record is quarantined"
            );
        }
        self.quarantine.quarantine(&self.group, poison).await?;
        metrics::counter!(metric_names::QUARANTINED_TOTAL, "group" => self.group.clone())
            .increment(poison.len() as u64);
        Ok(())
    }

    /// Makes no dead letters of records that another consumer has now: it delivers them, and the dead letter would deliver
    /// them again. An ack is fenced, but a publish is not.
    async fn leave_to_others(
        &self,
        settlements: &[Settlement<'_, BusItem<T>>],
        verdicts: &mut [Verdict<'_>],
    ) -> Result<(), StoreError> {
        let given_up =
            |(index, verdict): (usize, &Verdict<'_>)| matches!(verdict, Verdict::DeadLetter(_)).then_some(index);
        let given_up: Vec<usize> = verdicts.iter().enumerate().filter_map(given_up).collect();
        if given_up.is_empty() {
            return Ok(());
        }
        let positions: Vec<_> = given_up.iter().map(|&index| &settlements[index].claimed.item.position).collect();
        for (index, answer) in given_up.iter().zip(self.consumer.renew(&positions).await?) {
            if answer == Settled::LostLease {
                verdicts[*index] = Verdict::LostLease;
            }
        }
        Ok(())
    }

    /// Publishes these items to the dead-letter topic, or quarantines them if there is none. After an error the caller
    /// must try again with all of them. A second copy is harmless, because readers identify each by its id.
    async fn dead_letter(&self, to_dead_letter: &[(&Claimed<BusItem<T>>, &GivenUp)]) -> Result<(), StoreError> {
        if to_dead_letter.is_empty() {
            return Ok(());
        }
        let Some(dead_letter) = &self.options.dead_letter else {
            let poison = |(claimed, given_up): &(&Claimed<BusItem<T>>, &GivenUp)| {
                let record = claimed.item.record.as_deref()?.clone();
                Some(Poison { record, reason: given_up.failure.to_string() })
            };
            let poison: Vec<_> = to_dead_letter.iter().filter_map(poison).collect();
            return self.store_poison(&poison).await;
        };
        for part in parts(to_dead_letter, PUBLISHED_AT_ONCE, |(claimed, _)| claimed.bytes) {
            let mut records = Vec::with_capacity(part.len());
            for (claimed, given_up) in &part {
                records.push(dead_letter(&claimed.item, given_up).await?);
            }
            let results = self.bus.publish(records.clone()).await;
            let mut refused = Vec::new();
            for (((claimed, given_up), record), result) in part.iter().zip(records).zip(results) {
                match result {
                    Ok(()) => {}
                    Err(PublishError::Unavailable(error)) => {
                        return Err(StoreError::new("publish dead letters", error.kind(), error));
                    }
                    Err(PublishError::Refused { reason }) => {
                        let Record { key, value, headers, .. } = record;
                        let position = claimed.item.position.clone();
                        let record = Fetched { position, key, value, headers, damage: None };
                        let reason = format!("its dead letter is refused: {reason}; {}", given_up.failure);
                        refused.push(Poison { record, reason });
                    }
                }
            }
            if !refused.is_empty() {
                self.store_poison(&refused).await?;
            }
        }
        Ok(())
    }
}

/// Records that a claim is about to return. If the claim fails, panics or is cancelled first, dropping this value puts
/// the records back to be claimed again, so that none is lost.
struct Kept<'a, T: Send + Sync + 'static> {
    source: &'a BusSource<T>,
    items: Vec<Claimed<BusItem<T>>>,
}

impl<T: Send + Sync + 'static> Kept<'_, T> {
    fn into_items(mut self) -> Vec<Claimed<BusItem<T>>> {
        std::mem::take(&mut self.items)
    }
}

impl<T: Send + Sync + 'static> Drop for Kept<'_, T> {
    fn drop(&mut self) {
        let items: Vec<_> = self.items.drain(..).map(|claimed| (Duration::ZERO, claimed)).collect();
        self.source.keep(items);
    }
}

#[async_trait]
impl<T: Send + Sync + 'static> Source for BusSource<T> {
    type Item = BusItem<T>;

    async fn claim(&self, limit: usize) -> Result<Claim<Self::Item>, StoreError> {
        // Half of a claim: however many retries are due, other records are claimed too.
        let mut kept = self.due_again(limit.div_ceil(2)).await?;
        let mut more = None;
        // First those of earlier claims, which may leave no room for others.
        let is_isolated = self.isolate().await;
        if kept.items.len() < limit && lock(&self.waiting).has_room() {
            match self.fetch(limit - kept.items.len()).await {
                Ok((fetched, next)) => {
                    kept.items.extend(fetched);
                    more = next;
                }
                Err(error) if kept.items.is_empty() => return Err(error),
                Err(error) => {
                    tracing::warn!(group = self.group, error = error.chain(), "failed to fetch: claiming retries only");
                }
            }
        }
        if is_isolated {
            self.isolate().await;
        }
        let next_due = more.into_iter().chain(lock(&self.waiting).next_due()).min();
        Ok(Claim { items: kept.into_items(), next_due })
    }

    async fn settle(&self, settlements: &[Settlement<'_, Self::Item>]) -> Result<Vec<Settled>, StoreError> {
        let mut verdicts = self.verdicts(settlements);
        self.leave_to_others(settlements, &mut verdicts).await?;
        let verdicts_of = || settlements.iter().zip(&verdicts);
        let mut to_dead_letter: Vec<_> = verdicts_of()
            .filter_map(|(settlement, verdict)| match verdict {
                Verdict::DeadLetter(given_up) => Some((settlement.claimed, given_up)),
                _ => None,
            })
            .collect();
        // In the order of their records: a full lane refuses many at the same moment.
        to_dead_letter.sort_by_key(|(claimed, _)| {
            let position = &claimed.item.position;
            (&position.topic, position.partition, position.offset)
        });
        self.dead_letter(&to_dead_letter).await?;
        let (mut acked, mut again) = (Vec::new(), Vec::new());
        let mut settled = vec![Settled::Applied; settlements.len()];
        for (index, (settlement, verdict)) in verdicts_of().enumerate() {
            match verdict {
                Verdict::Wait { after, counted, failure } => {
                    again.push((*after, next_attempt(settlement.claimed, *counted, *failure)));
                }
                // Delivered, or dead-lettered by now.
                Verdict::Ack | Verdict::DeadLetter(_) => acked.push(index),
                Verdict::LostLease => settled[index] = Settled::LostLease,
            }
        }
        let positions: Vec<_> = acked.iter().map(|&index| &settlements[index].claimed.item.position).collect();
        for (index, answer) in acked.iter().zip(self.consumer.ack(&positions).await?) {
            settled[*index] = answer;
        }
        self.keep(again);
        Ok(settled)
    }

    async fn renew(&self, claimed: &[&Claimed<Self::Item>]) -> Result<Vec<Settled>, StoreError> {
        let positions: Vec<_> = claimed.iter().map(|claimed| &claimed.item.position).collect();
        self.consumer.renew(&positions).await
    }

    async fn release(&self, claimed: &[&Claimed<Self::Item>]) -> Result<(), StoreError> {
        self.keep(claimed.iter().map(|claimed| (Duration::ZERO, (*claimed).clone())));
        Ok(())
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.consumer.close().await
    }

    /// The records of a bus are not handed to user code, which could block a thread.
    fn renews_on_own_thread(&self) -> bool {
        false
    }

    fn lease(&self) -> Duration {
        self.consumer.lease()
    }

    fn wakeup(&self) -> &Wakeup {
        self.consumer.wakeup()
    }

    fn may_start(&self, claimed: &Claimed<Self::Item>) -> bool {
        self.consumer.may_start(&claimed.item.position)
    }

    async fn revoked(&self) {
        self.consumer.revocations().signalled().await;
        self.give_up_revoked();
    }
}

/// What happens to a record.
enum Verdict<'a> {
    Ack,
    DeadLetter(GivenUp),
    Wait { after: Duration, counted: bool, failure: Option<&'a Failure> },
    LostLease,
}

impl<T: Send + Sync + 'static> BusSource<T> {
    /// Decides for each settlement. With a dead-letter topic, an item goes there too if it must not wait in memory:
    /// because the wait is too long, because there is no room, or because the attempt could not be made and would be
    /// retried here for ever, uncounted.
    fn verdicts<'a>(&self, settlements: &[Settlement<'a, BusItem<T>>]) -> Vec<Verdict<'a>> {
        let mut shares = self.options.dead_letter.as_ref().map(|_| lock(&self.waiting).shares());
        let mut verdict = |settlement: &Settlement<'a, BusItem<T>>| match settlement.disposition {
            Disposition::Dead(failure) => Verdict::DeadLetter(GivenUp::of(settlement.claimed, failure, false)),
            Disposition::Retry { after, counted, failure: Some(failure) }
                if shares.as_mut().is_some_and(|shares| {
                    !counted || *after > self.options.defer_after || !shares.admit(settlement.claimed)
                }) =>
            {
                Verdict::DeadLetter(GivenUp::of(settlement.claimed, failure, true))
            }
            Disposition::Retry { after, counted, failure } => {
                Verdict::Wait { after: *after, counted: *counted, failure: failure.as_ref() }
            }
            _ => Verdict::Ack,
        };
        settlements.iter().map(&mut verdict).collect()
    }
}

fn next_attempt<T>(claimed: &Claimed<BusItem<T>>, counted: bool, failure: Option<&Failure>) -> Claimed<BusItem<T>> {
    let mut next = claimed.clone();
    if let Some(failure) = failure {
        next.item.first_failed_at.get_or_insert_with(Utc::now);
        next.item.last_failure = Some(Arc::new(failure.clone()));
    }
    next.attempt += u32::from(counted);
    next
}
