use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use tokio::time::Instant;

use crate::bus::{Bus, Consumer, Fetched, Poison, Position, Quarantine, Record};
use crate::relay::LONGEST_WAIT;
use crate::{
    Claim, Claimed, Disposition, Failure, FailureClass, Settled, Settlement, Source, StoreError, Wakeup, lock,
    metric_names,
};

/// A bus as a [`Source`]: it claims the records that a group has not acked, and acks a record when it is settled.
///
/// Retries stay in memory: the record is unacked and due again later. Three kinds of records are published to their
/// dead-letter topic and acked after that publish is durable: a dead record, a record whose retry is too far away to
/// wait in memory, and a record whose attempt could not be made. An unreadable record is quarantined before its ack.
pub struct BusSource<T> {
    group: String,
    bus: Arc<dyn Bus>,
    consumer: Box<dyn Consumer>,
    quarantine: Arc<dyn Quarantine>,
    options: BusSourceOptions<T>,
    waiting: Mutex<Waiting<T>>,
    /// Unreadable records that are not in the quarantine yet; the consumer hands them out only once.
    unreadable: Mutex<Vec<Poison>>,
}

type Decode<T> = Box<dyn Fn(&Fetched) -> Result<Decoded<T>, String> + Send + Sync>;
type DeadLetter<T> = Box<dyn Fn(&BusItem<T>, u32, &Failure) -> Record + Send + Sync>;

/// The options of one group's source.
pub struct BusSourceOptions<T> {
    /// Decodes a record. An operator sees the text of an error in the quarantine.
    pub decode: Decode<T>,
    /// Builds the dead-letter record of an item from the attempts made and the last failure. `None` if the group has no
    /// dead-letter topic: then a dead item is quarantined.
    pub dead_letter: Option<DeadLetter<T>>,
    /// An item whose next attempt is further away than this is deferred to the dead-letter topic.
    pub defer_after: Duration,
    /// How many records may wait for a retry. At this limit no more are fetched.
    pub max_waiting: usize,
    /// How many bytes the waiting records may have. At this limit no more are fetched.
    pub max_waiting_bytes: usize,
}

/// A decoded record.
pub struct Decoded<T> {
    /// The decoded value.
    pub value: T,
    /// How many attempts the record has, if it sets its own limit.
    pub budget: Option<u32>,
}

/// One claimed record.
pub struct BusItem<T> {
    /// The decoded value.
    pub value: Arc<T>,
    /// The position of the record.
    pub position: Position,
    /// The record as it was read, for the quarantine.
    record: Arc<Fetched>,
    /// When the first attempt failed.
    pub first_failed_at: Option<DateTime<Utc>>,
}

impl<T> Clone for BusItem<T> {
    fn clone(&self) -> Self {
        Self {
            value: self.value.clone(),
            position: self.position.clone(),
            record: self.record.clone(),
            first_failed_at: self.first_failed_at,
        }
    }
}

/// Records that are due again later, the earliest on top.
struct Waiting<T> {
    heap: BinaryHeap<Reverse<Due<T>>>,
    next_number: u64,
    bytes: usize,
}

struct Due<T> {
    at: Instant,
    /// Records that are due at the same time keep their order of arrival.
    number: u64,
    claimed: Claimed<BusItem<T>>,
}

impl<T> Ord for Due<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl<T> PartialOrd for Due<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> PartialEq for Due<T> {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl<T> Eq for Due<T> {}

impl<T: Send + Sync + 'static> BusSource<T> {
    /// Reads the records that the consumer of this group fetches, and publishes dead letters to the bus.
    pub fn new(
        group: impl Into<String>,
        bus: Arc<dyn Bus>,
        consumer: Box<dyn Consumer>,
        quarantine: Arc<dyn Quarantine>,
        options: BusSourceOptions<T>,
    ) -> Self {
        let waiting = Mutex::new(Waiting { heap: BinaryHeap::new(), next_number: 0, bytes: 0 });
        Self { group: group.into(), bus, consumer, quarantine, options, waiting, unreadable: Mutex::default() }
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

    /// Returns the fetched items, and true if more may be fetched at once.
    async fn fetch(&self, limit: usize) -> Result<(Vec<Claimed<BusItem<T>>>, bool), StoreError> {
        let mut items = Vec::new();
        let mut unreadable = Vec::new();
        let records = self.consumer.fetch(limit).await?;
        let full = records.len() >= limit;
        for record in records {
            let decoded = match &record.damage {
                Some(damage) => Err(damage.clone()),
                // A decoder that panics must not lose the other records of the fetch.
                None => catch_unwind(AssertUnwindSafe(|| (self.options.decode)(&record)))
                    .unwrap_or_else(|_| Err("its decoder panicked".into())),
            };
            match decoded {
                Ok(decoded) => {
                    let bytes = record.value.len() + record.key.len();
                    let item = BusItem {
                        value: Arc::new(decoded.value),
                        position: record.position.clone(),
                        record: Arc::new(record),
                        first_failed_at: None,
                    };
                    items.push(Claimed { budget: decoded.budget, ..Claimed::new(item, 1, bytes) });
                }
                Err(reason) => unreadable.push(Poison { record, reason }),
            }
        }
        lock(&self.unreadable).extend(unreadable);
        Ok((items, full))
    }

    /// Quarantines and acks the unreadable records. If that fails, the next claim tries again.
    async fn isolate(&self) {
        // The records stay in the list until that is done, even if this call fails or is cancelled. Claims run one at a
        // time, so the list still starts with these records afterwards.
        let poison = lock(&self.unreadable).clone();
        if poison.is_empty() {
            return;
        }
        match self.quarantine_and_ack(&poison).await {
            Ok(()) => drop(lock(&self.unreadable).drain(..poison.len())),
            Err(error) => {
                tracing::error!(
                    group = self.group,
                    error = error.chain(),
                    "failed to quarantine unreadable records: their partitions make no progress; trying again"
                );
            }
        }
    }

    async fn quarantine_and_ack(&self, poison: &[Poison]) -> Result<(), StoreError> {
        for Poison { record, reason } in poison {
            tracing::error!(
                group = self.group,
                topic = %record.position.topic,
                partition = record.position.partition,
                offset = record.position.offset,
                reason,
                "an unreadable record is quarantined"
            );
        }
        self.quarantine.quarantine(&self.group, poison).await?;
        metrics::counter!(metric_names::QUARANTINED_TOTAL, "group" => self.group.clone())
            .increment(poison.len() as u64);
        let positions: Vec<_> = poison.iter().map(|poison| &poison.record.position).collect();
        self.consumer.ack(&positions).await?;
        Ok(())
    }

    /// Publishes these items to the dead-letter topic, or quarantines them if there is none. After an error the caller
    /// must try again with all of them. A second copy is harmless, because readers identify each by its id.
    async fn dead_letter(&self, spent: &[(&Claimed<BusItem<T>>, &Failure)]) -> Result<(), StoreError> {
        if spent.is_empty() {
            return Ok(());
        }
        let Some(dead_letter) = &self.options.dead_letter else {
            let poison = |(claimed, failure): &(&Claimed<BusItem<T>>, &Failure)| Poison {
                record: (*claimed.item.record).clone(),
                reason: failure.to_string(),
            };
            let poison: Vec<_> = spent.iter().map(poison).collect();
            return self.quarantine.quarantine(&self.group, &poison).await;
        };
        let record = |(claimed, failure): &(&Claimed<BusItem<T>>, &Failure)| {
            // An outage means that the attempt could not be made, so it does not count.
            let made = claimed.attempt - u32::from(failure.class == FailureClass::Outage);
            dead_letter(&claimed.item, made, failure)
        };
        let published = self.bus.publish(spent.iter().map(record).collect()).await;
        match published.into_iter().find_map(Result::err) {
            None => Ok(()),
            Some(error) => Err(StoreError::new("publish dead letters", error.kind(), error)),
        }
    }

    /// True if the limits on waiting records allow another fetch.
    fn has_room(&self) -> bool {
        let waiting = lock(&self.waiting);
        waiting.heap.len() < self.options.max_waiting && waiting.bytes < self.options.max_waiting_bytes
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
        let mut waiting = lock(&self.source.waiting);
        self.items.drain(..).for_each(|claimed| waiting.put(Duration::ZERO, claimed));
    }
}

impl<T> Waiting<T> {
    fn put(&mut self, wait: Duration, claimed: Claimed<BusItem<T>>) {
        self.next_number += 1;
        self.bytes += claimed.bytes;
        let at = Instant::now() + wait.min(LONGEST_WAIT);
        self.heap.push(Reverse(Due { at, number: self.next_number, claimed }));
    }

    fn take_due(&mut self, now: Instant, limit: usize) -> Vec<Claimed<BusItem<T>>> {
        let mut due = Vec::new();
        while due.len() < limit && self.heap.peek().is_some_and(|Reverse(next)| next.at <= now) {
            due.extend(self.heap.pop().map(|Reverse(next)| next.claimed));
        }
        self.bytes -= due.iter().map(|claimed| claimed.bytes).sum::<usize>();
        due
    }
}

#[async_trait]
impl<T: Send + Sync + 'static> Source for BusSource<T> {
    type Item = BusItem<T>;

    async fn claim(&self, limit: usize) -> Result<Claim<Self::Item>, StoreError> {
        let mut kept = self.due_again(limit).await?;
        let mut full = false;
        if kept.items.len() < limit && self.has_room() {
            match self.fetch(limit - kept.items.len()).await {
                Ok((fetched, is_full)) => {
                    kept.items.extend(fetched);
                    full = is_full;
                }
                Err(error) if kept.items.is_empty() => return Err(error),
                Err(error) => {
                    tracing::warn!(group = self.group, error = error.chain(), "failed to fetch: claiming retries only");
                }
            }
        }
        self.isolate().await;
        let next =
            lock(&self.waiting).heap.peek().map(|Reverse(next)| next.at.saturating_duration_since(Instant::now()));
        // A full fetch with unreadable records returns fewer items than the limit, although there may be more.
        let next_due = if full { Some(Duration::ZERO) } else { next };
        Ok(Claim { items: kept.into_items(), next_due })
    }

    async fn settle(&self, settlements: &[Settlement<'_, Self::Item>]) -> Result<Vec<Settled>, StoreError> {
        let defer_after = self.options.dead_letter.as_ref().map(|_| self.options.defer_after);
        let spent: Vec<_> = settlements
            .iter()
            .filter_map(|settlement| {
                failure_to_dead_letter(settlement.disposition, defer_after).map(|failure| (settlement.claimed, failure))
            })
            .collect();
        self.dead_letter(&spent).await?;
        let mut acked = Vec::new();
        let mut again = Vec::new();
        let mut settled = vec![Settled::Applied; settlements.len()];
        for (index, settlement) in settlements.iter().enumerate() {
            let disposition = settlement.disposition;
            match disposition {
                Disposition::Retry { after, counted, .. }
                    if failure_to_dead_letter(disposition, defer_after).is_none() =>
                {
                    again.push((*after, next_attempt(settlement.claimed, *counted)));
                }
                // Delivered, or dead-lettered by now.
                _ => acked.push(index),
            }
        }
        let positions: Vec<_> = acked.iter().map(|&index| &settlements[index].claimed.item.position).collect();
        for (index, answer) in acked.iter().zip(self.consumer.ack(&positions).await?) {
            settled[*index] = answer;
        }
        let mut waiting = lock(&self.waiting);
        again.into_iter().for_each(|(wait, claimed)| waiting.put(wait, claimed));
        Ok(settled)
    }

    async fn renew(&self, claimed: &[&Claimed<Self::Item>]) -> Result<Vec<Settled>, StoreError> {
        let positions: Vec<_> = claimed.iter().map(|claimed| &claimed.item.position).collect();
        self.consumer.renew(&positions).await
    }

    async fn release(&self, claimed: &[&Claimed<Self::Item>]) -> Result<(), StoreError> {
        let mut waiting = lock(&self.waiting);
        claimed.iter().for_each(|claimed| waiting.put(Duration::ZERO, (*claimed).clone()));
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
}

/// The failure of an item that is dead. With a dead-letter topic, also the failure of an item that must not wait in
/// memory: because the wait is too long, or because the attempt could not be made and would be retried here for ever,
/// uncounted.
fn failure_to_dead_letter(disposition: &Disposition, defer_after: Option<Duration>) -> Option<&Failure> {
    match (disposition, defer_after) {
        (Disposition::Dead(failure), _) => Some(failure),
        (Disposition::Retry { after, counted, failure: Some(failure) }, Some(longest))
            if !counted || *after > longest =>
        {
            Some(failure)
        }
        _ => None,
    }
}

fn next_attempt<T>(claimed: &Claimed<BusItem<T>>, counted: bool) -> Claimed<BusItem<T>> {
    let mut next = claimed.clone();
    next.item.first_failed_at.get_or_insert_with(Utc::now);
    next.attempt += u32::from(counted);
    next
}
