use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::store::{Leased, LogStore, Newest, StoredRecord};
use super::{Log, Subscription};
use crate::bus::{Advance, AssignedPartition, Assignment, Consumer, Fetched, Position};
use crate::{Settled, StoreError, Wakeup, lock};

/// How often a consumer looks for new topics, free partitions and members of other processes.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// The same for a consumer that has nothing to read.
const IDLE_LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The longest text of a completed set. It is limited because every ack writes it. The limit is enough for gaps anywhere
/// among about a hundred thousand records.
pub const MAX_COMPLETED_TEXT: usize = 16_384;

/// One member of a group.
pub(super) struct GroupConsumer<S> {
    log: Log<S>,
    subscription: Arc<Subscription>,
    assignment: Mutex<Assignment>,
    /// Locked while partitions are assigned and while records are handed out, so that neither happens during the other.
    membership: tokio::sync::Mutex<Membership>,
    /// Locked while progress is recorded, because each ack adds to the progress that the previous ack wrote.
    recording: tokio::sync::Mutex<()>,
    revocations: Wakeup,
}

struct Membership {
    /// When the statement that last renewed all leases was sent.
    renewed_at: Option<Instant>,
    looked_at: Instant,
    nothing_new: Option<NothingNew>,
    closed: bool,
    /// The group when partitions were last leased.
    members: usize,
    partitions: usize,
    /// How many partitions this consumer should have.
    share: usize,
}

/// The state at a fetch that found nothing in any partition. Until one of these values changes, the next fetch would
/// find nothing, either. Without this check, an idle group with a thousand topics would run a thousand range scans
/// twice a second.
struct NothingNew {
    newest: Newest,
    places: Vec<(i64, i64)>,
}

impl Membership {
    /// True if the remaining time of the leases is shorter than [`Consumer::lease`].
    fn is_aged(&self, full_lease: Duration) -> bool {
        self.renewed_at.is_none_or(|at| at.elapsed() >= full_lease / 10)
    }
}

impl<S: LogStore> GroupConsumer<S> {
    pub(super) async fn join(log: Log<S>, subscription: Arc<Subscription>) -> Result<Self, StoreError> {
        let consumer = Self {
            log,
            assignment: Mutex::new(Assignment::new(&*subscription.member.group, MAX_COMPLETED_TEXT)),
            subscription,
            membership: tokio::sync::Mutex::new(Membership {
                renewed_at: None,
                looked_at: Instant::now(),
                nothing_new: None,
                closed: false,
                members: 0,
                partitions: 0,
                share: 0,
            }),
            recording: tokio::sync::Mutex::default(),
            revocations: Wakeup::default(),
        };
        consumer.keep_leases(&mut *consumer.membership.lock().await).await?;
        Ok(consumer)
    }

    fn store(&self) -> &S {
        &self.log.0.store
    }

    fn full_lease(&self) -> Duration {
        self.log.0.options.lease
    }

    /// Renews leases that have aged, and leases free partitions.
    async fn keep_leases(&self, membership: &mut Membership) -> Result<(), StoreError> {
        let changed = self.subscription.partitions_changed.swap(false, Ordering::AcqRel);
        let mut must_lease = changed || membership.is_aged(self.full_lease());
        if !must_lease && membership.looked_at.elapsed() >= LOOK_INTERVAL {
            must_lease = self.look(membership).await?;
        }
        if !must_lease {
            return Ok(());
        }
        let result = self.lease_partitions(membership).await;
        if result.is_err() && changed {
            self.subscription.partitions_changed.store(true, Ordering::Release);
        }
        result
    }

    /// True if this consumer should have other partitions: there is a free one that it may lease, or the number of
    /// members or partitions has changed.
    async fn look(&self, membership: &mut Membership) -> Result<bool, StoreError> {
        let look = self.store().look(&self.subscription.member, self.full_lease()).await?;
        membership.looked_at = Instant::now();
        let has_changed = (look.members, look.partitions) != (membership.members, membership.partitions);
        Ok(has_changed || (look.has_free && lock(&self.assignment).kept() < membership.share))
    }

    async fn lease_partitions(&self, membership: &mut Membership) -> Result<(), StoreError> {
        let sent_at = Instant::now();
        let leases = self.store().lease(&self.subscription.member, self.full_lease()).await?;
        (membership.members, membership.partitions) = (leases.members, leases.partitions);
        membership.share = leases.share;
        let ids: HashSet<i64> = leases.leased.iter().map(|leased| leased.partition_id).collect();
        let is_revoked = {
            let mut assignment = lock(&self.assignment);
            let is_lost = assignment.retain(|id| ids.contains(&id));
            for leased in leases.leased {
                if !assignment.contains(leased.partition_id, leased.generation) {
                    let id = leased.partition_id;
                    assignment.insert(id, self.assigned(leased), sent_at + self.full_lease());
                }
            }
            assignment.revoke_beyond(leases.share, Instant::now() + self.log.0.options.revoke_timeout) || is_lost
        };
        if is_revoked {
            self.revocations.wake();
        }
        membership.renewed_at = Some(sent_at);
        membership.looked_at = sent_at;
        self.finish_revocations().await
    }

    fn assigned(&self, leased: Leased) -> AssignedPartition {
        let is_lost = leased.is_position_lost();
        let Leased { topic, partition, generation, progress, first_offset, next_offset, .. } = leased;
        let assigned = AssignedPartition::new(topic, partition, generation, progress);
        match is_lost {
            true => assigned.position_lost(&self.subscription.member.group, first_offset, next_offset),
            false => assigned,
        }
    }

    /// Releases the revoked partitions of which nothing is in flight any more, or whose time is over.
    async fn finish_revocations(&self) -> Result<(), StoreError> {
        if lock(&self.assignment).drained(Instant::now()).0.is_empty() {
            return Ok(());
        }
        // An ack that is being recorded must not find its partition released.
        let _recording = self.recording.lock().await;
        let (drained, is_lost) = lock(&self.assignment).drained(Instant::now());
        if drained.is_empty() {
            return Ok(());
        }
        self.store().release(&self.subscription.member, &drained).await?;
        lock(&self.assignment).retain(|id| !drained.contains(&id));
        if is_lost {
            self.revocations.wake();
        }
        self.wake_group();
        Ok(())
    }

    /// Lets the other consumers of this group in this process lease what is free now.
    fn wake_group(&self) {
        let group = &self.subscription.member.group;
        self.log.partitions_changed(|other| other.member.group == *group && !std::ptr::eq(other, &*self.subscription));
    }

    /// True if a fetch would find nothing: no record was appended since a fetch that found nothing, the consumer would
    /// read from the same offsets, and the leases need no renewal.
    fn is_idle(&self, membership: &Membership, newest: Newest) -> bool {
        let is_young = membership.renewed_at.is_some_and(|at| at.elapsed() < self.full_lease() / 2);
        let nothing_new = membership
            .nothing_new
            .as_ref()
            .is_some_and(|nothing| nothing.newest == newest && nothing.places == lock(&self.assignment).fetchable());
        is_young && nothing_new && !self.subscription.partitions_changed.load(Ordering::Acquire)
    }

    fn hand_out(&self, records: Vec<StoredRecord>) -> Vec<Fetched> {
        let mut assignment = lock(&self.assignment);
        let hand_out = |record: StoredRecord| {
            let position = assignment.hand_out(record.partition_id, record.offset)?;
            let StoredRecord { key, value, headers, damage, .. } = record;
            Some(Fetched { position, key, value, headers, damage })
        };
        records.into_iter().filter_map(hand_out).collect()
    }

    /// The partition of each position, if the consumer still has it, and the progress of these partitions with the acks
    /// added.
    fn advance(&self, positions: &[&Position]) -> (Vec<Option<i64>>, Vec<Advance>) {
        let assignment = lock(&self.assignment);
        let mut advances: BTreeMap<i64, Advance> = BTreeMap::new();
        let complete = |position: &&Position| {
            let partition_id = assignment.id_of(position)?;
            let advance = match advances.entry(partition_id) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(assignment.advance(partition_id, position.generation)?),
            };
            advance.progress.complete(position.offset);
            Some(partition_id)
        };
        let partitions = positions.iter().map(complete).collect();
        (partitions, advances.into_values().collect())
    }

    /// Adds acks to the progress. Returns true if a paused partition may be read again.
    fn remember(&self, advances: &[Advance]) -> bool {
        let mut assignment = lock(&self.assignment);
        let read_again = advances.iter().filter(|advance| assignment.recorded(Advance::clone(advance)));
        read_again.count() > 0
    }

    async fn record(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        let _recording = self.recording.lock().await;
        let (partitions, advances) = self.advance(positions);
        if advances.is_empty() {
            return Ok(vec![Settled::LostLease; positions.len()]);
        }
        // Remembered before the store answers: if the answer is lost, the store may have this progress, and refuses a
        // later ack that is behind it as the ack of a consumer that lost the partition.
        if self.remember(&advances) {
            self.subscription.wakeup.wake();
        }
        let recorded = self.store().record(&self.subscription.member, &advances).await?;
        let recorded: HashSet<i64> = recorded.into_iter().collect();
        let mut assignment = lock(&self.assignment);
        for advance in advances {
            if !recorded.contains(&advance.partition_id) {
                assignment.remove(advance.partition_id, advance.generation);
                self.revocations.wake();
            }
        }
        assignment.release(positions);
        let is_recorded = |id: Option<i64>| id.is_some_and(|id| recorded.contains(&id));
        Ok(partitions.into_iter().map(|id| Settled::of(is_recorded(id))).collect())
    }
}

#[async_trait]
impl<S: LogStore> Consumer for GroupConsumer<S> {
    async fn fetch(&self, limit: usize) -> Result<Vec<Fetched>, StoreError> {
        let mut membership = self.membership.lock().await;
        if membership.closed || limit == 0 {
            return Ok(Vec::new());
        }
        self.finish_revocations().await?;
        // Read before the fetch, so that the next fetch notices records that are appended during this one.
        let newest = self.store().newest().await?;
        if self.is_idle(&membership, newest) {
            // The leases are not renewed each time, because that writes one row per partition.
            let may_wait = membership.looked_at.elapsed() < IDLE_LOOK_INTERVAL.min(self.full_lease() / 10);
            if may_wait || !self.look(&mut membership).await? {
                return Ok(Vec::new());
            }
            self.subscription.partitions_changed.store(true, Ordering::Release);
        }
        self.keep_leases(&mut membership).await?;
        loop {
            let places = lock(&self.assignment).fetchable();
            if places.is_empty() {
                return Ok(Vec::new());
            }
            let (records, full) = self.store().read(&places, limit).await?;
            if records.is_empty() {
                membership.nothing_new = Some(NothingNew { newest, places });
                return Ok(Vec::new());
            }
            if let Some(last) = records.last().filter(|_| full) {
                lock(&self.assignment).move_to_back(last.partition_id);
            }
            let fetched = self.hand_out(records);
            if full && (1..limit).contains(&fetched.len()) {
                // The caller gets fewer records than `limit` and would wait for a wake-up, although there are more.
                self.subscription.wakeup.wake();
            }
            membership.nothing_new = None;
            // If a full read contained only completed records, there may be more records after it.
            if !fetched.is_empty() || !full {
                return Ok(fetched);
            }
        }
    }

    async fn ack(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        let settled = self.record(positions).await?;
        self.finish_revocations().await?;
        Ok(settled)
    }

    /// Nothing to do: an ack is durable when it returns.
    async fn flush(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn release(&self, positions: &[&Position]) {
        lock(&self.assignment).release(positions);
        self.subscription.wakeup.wake();
    }

    fn may_start(&self, position: &Position) -> bool {
        lock(&self.assignment).may_start(position)
    }

    async fn renew(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        let mut membership = self.membership.lock().await;
        // The source calls `renew` at every claim with due retries. Young leases are not renewed each time, because
        // that writes one row per partition.
        if !membership.closed && membership.is_aged(self.full_lease()) {
            self.lease_partitions(&mut membership).await?;
        }
        let assignment = lock(&self.assignment);
        Ok(positions.iter().map(|position| Settled::of(assignment.id_of(position).is_some())).collect())
    }

    async fn close(&self) -> Result<(), StoreError> {
        let mut membership = self.membership.lock().await;
        membership.closed = true;
        lock(&self.assignment).retain(|_| false);
        self.store().leave(&self.subscription.member).await?;
        self.wake_group();
        Ok(())
    }

    fn lease(&self) -> Duration {
        // Leases are renewed when a tenth of their time has passed, so this much is left after a fetch or renewal.
        self.full_lease() * 9 / 10
    }

    fn wakeup(&self) -> &Wakeup {
        &self.subscription.wakeup
    }

    fn revocations(&self) -> &Wakeup {
        &self.revocations
    }
}
