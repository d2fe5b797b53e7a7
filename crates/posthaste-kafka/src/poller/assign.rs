//! Which partitions a consumer reads, and from where.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use posthaste_core::bus::AssignedPartition;
use posthaste_core::hub_store::ResetTo;
use posthaste_core::{FaultKind, Progress, StoreError, lock};
use rdkafka::TopicPartitionList;
use rdkafka::consumer::{CommitMode, Consumer};
use rdkafka::error::KafkaResult;
use rdkafka::topic_partition_list::Offset;

use super::Poller;
use crate::commit;
use crate::consumer::Reset;
use crate::errors::failed;
use crate::positions::{Bounds, TopicPartition, bounds, committed, list, unreadable};

/// How long a consumer that gives up a partition to another one waits for the records in flight.
const REVOKE_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a consumer looks if a lost position was reset, and if a partition that could not be read can be read now.
const CHECK_POSITIONS: Duration = Duration::from_secs(1);
pub(crate) const RESETTING: &str = "reset the position of a group";

impl Poller {
    /// Reads the positions of partitions that were assigned, and starts to read them.
    pub(super) fn finish_assignment(&mut self) {
        let Some(partitions) = self.assigning.take() else { return };
        if let Err(error) = self.assign(&partitions) {
            tracing::warn!(group = self.shared.group, %error, "failed to read the positions of a group; trying again");
            self.assigning = Some(partitions);
        }
    }

    fn assign(&mut self, partitions: &[TopicPartition]) -> KafkaResult<()> {
        let Found { positions, unknown } = self.positions(partitions)?;
        let mut list = TopicPartitionList::new();
        for ((topic, number), position) in positions.iter().filter(|(_, position)| !position.is_lost()) {
            list.add_partition_offset(topic, *number, Offset::Offset(position.progress.watermark()))?;
        }
        self.consumer.incremental_assign(&list)?;
        tracing::debug!(group = self.shared.group, ?partitions, "partitions were assigned");
        for (partition, why) in unknown {
            let (id, group) = (self.id(&partition), &self.shared.group);
            if self.unread.insert(id) {
                let (topic, number) = &partition;
                tracing::warn!(group, topic, partition = number, why, "a partition cannot be read now; trying again");
            }
        }
        for (partition, position) in positions {
            self.insert(partition, position);
        }
        Ok(())
    }

    /// Adds a partition whose position is known to the assignment.
    fn insert(&mut self, partition: TopicPartition, position: Position) {
        let id = self.id(&partition);
        match position.is_lost() {
            true => self.unread.insert(id),
            false => self.unread.remove(&id),
        };
        self.generation += 1;
        let (is_lost, is_new) = (position.is_lost(), position.is_new);
        let Position { progress, bounds: Bounds { first, next }, .. } = position;
        let assigned = AssignedPartition::new(partition.0, partition.1 as u32, self.generation, progress);
        let assigned = if is_lost { assigned.position_lost(&self.shared.group, first, next) } else { assigned };
        let mut state = lock(&self.shared.state);
        // The cluster says when the partition is revoked, so the lease itself has no end.
        state.assignment.insert(id, assigned, tokio::time::Instant::now());
        if is_new {
            // From now on the group has a position, and a lost one is an error.
            state.uncommitted.add([id], Instant::now());
        }
    }

    /// The id of a partition. It keeps its id when it is assigned again.
    fn id(&mut self, partition: &TopicPartition) -> i64 {
        let next = self.names.len() as i64;
        let id = *self.ids.entry(partition.clone()).or_insert(next);
        if id == next {
            self.names.push(partition.clone());
        }
        id
    }

    /// Answers an assignment that was not finished: none of its partitions is read.
    pub(super) fn refuse_assignment(&mut self) {
        let Some(partitions) = self.assigning.take() else { return };
        for partition in partitions {
            let id = self.id(&partition);
            self.unread.insert(id);
        }
        if let Err(error) = self.consumer.incremental_assign(&TopicPartitionList::new()) {
            tracing::debug!(group = self.shared.group, %error, "an assignment was not answered");
        }
    }

    /// Where the group continues in each partition.
    fn positions(&self, partitions: &[TopicPartition]) -> KafkaResult<Found> {
        let unknown = unreadable(&self.consumer, partitions)?;
        let readable: Vec<_> =
            partitions.iter().filter(|partition| !unknown.contains_key(*partition)).cloned().collect();
        let bounds = bounds(&self.consumer, &readable)?;
        let mut positions = Vec::with_capacity(readable.len());
        for (partition, progress) in committed(&self.consumer, &readable)? {
            let Some(bounds) = bounds.get(&partition).copied() else { continue };
            let is_new = progress.is_none();
            let progress = progress.unwrap_or_else(|| Progress::at(bounds.first));
            positions.push((partition, Position { progress, bounds, is_new }));
        }
        Ok(Found { positions, unknown })
    }

    /// Tries again to read the assigned partitions whose position the cluster did not tell.
    fn read_unknown(&mut self) -> KafkaResult<()> {
        let unknown: Vec<TopicPartition> = self.unknown().map(|id| self.names[id as usize].clone()).collect();
        let unreadable = unreadable(&self.consumer, &unknown)?;
        let readable: Vec<_> = unknown.into_iter().filter(|partition| !unreadable.contains_key(partition)).collect();
        if readable.is_empty() { Ok(()) } else { self.assign(&readable) }
    }

    /// The assigned partitions whose position the cluster did not tell.
    fn unknown(&self) -> impl Iterator<Item = i64> {
        self.unread.iter().copied().filter(|id| !lock(&self.shared.state).assignment.has(*id))
    }

    pub(super) fn begin_revocation(&mut self, partitions: Vec<TopicPartition>) {
        tracing::debug!(group = self.shared.group, ?partitions, "partitions were revoked");
        let ids = self.ids_of(&partitions);
        let until = tokio::time::Instant::now() + REVOKE_TIMEOUT;
        lock(&self.shared.state).assignment.revoke(&ids, until);
        self.revoking = Some(Revoking { partitions, until });
        self.shared.revocations.wake();
    }

    /// Gives up revoked partitions when nothing of them is in flight any more and all acks are committed, or when their
    /// time is over.
    pub(super) fn finish_revocation(&mut self) {
        let Some(Revoking { partitions, until }) = self.revoking.take() else { return };
        let ids: BTreeSet<i64> = self.ids_of(&partitions).into_iter().collect();
        let is_lost = self.consumer.assignment_lost();
        if !is_lost {
            let drained = lock(&self.shared.state).assignment.drained(tokio::time::Instant::now()).0;
            let is_drained = ids.iter().all(|id| drained.contains(id) || !lock(&self.shared.state).assignment.has(*id));
            if !is_drained || !self.commit_before_revocation(&ids, until) {
                self.revoking = Some(Revoking { partitions, until });
                return;
            }
        }
        tracing::debug!(group = self.shared.group, ?partitions, is_lost, "revoked partitions are given up");
        self.give_up(&ids);
    }

    /// Stops to read these partitions.
    pub(super) fn give_up(&mut self, ids: &BTreeSet<i64>) {
        let had_records_in_flight = {
            let mut state = lock(&self.shared.state);
            state.forget(ids);
            state.assignment.retain(|id| !ids.contains(&id))
        };
        // Otherwise the client would still pause a partition that it gets again later. It must not be resumed then: the
        // client could skip records.
        let paused: Vec<_> = self.paused.intersection(ids).map(|id| self.names[*id as usize].clone()).collect();
        if !paused.is_empty()
            && let Err(error) = self.consumer.resume(&list(&paused))
        {
            tracing::warn!(group = self.shared.group, %error, "failed to resume partitions before they are given up");
        }
        self.paused.retain(|id| !ids.contains(id));
        if had_records_in_flight {
            self.shared.revocations.wake();
        }
        let read = ids.difference(&self.unread);
        let partitions: Vec<_> = read.map(|id| self.names[*id as usize].clone()).collect();
        self.unread.retain(|id| !ids.contains(id));
        if let Err(error) = self.consumer.incremental_unassign(&list(&partitions)) {
            tracing::warn!(group = self.shared.group, %error, "failed to give up partitions");
        }
    }

    /// What is acked is committed before another consumer reads the partitions. Returns false if that has to be tried
    /// again.
    fn commit_before_revocation(&mut self, ids: &BTreeSet<i64>, until: tokio::time::Instant) -> bool {
        let uncommitted = lock(&self.shared.state).uncommitted.among(ids);
        let Err(error) = self.commit(&uncommitted) else { return true };
        let is_over = self.consumer.assignment_lost() || tokio::time::Instant::now() >= until;
        let group = &self.shared.group;
        match is_over {
            true => tracing::warn!(group, %error, "a commit failed before a rebalance: deliveries repeat"),
            false => tracing::debug!(group, %error, "a commit failed before a rebalance; trying again"),
        }
        is_over
    }

    /// Reads these partitions again, from the position that is committed for the group.
    fn read_again(&mut self, partitions: Vec<TopicPartition>) {
        self.give_up(&self.ids_of(&partitions).into_iter().collect());
        self.assigning = Some(partitions);
        self.finish_assignment();
    }

    /// Finds partitions whose position is lost although they are assigned, lost positions that exist again because
    /// another process reset them, and partitions that can be read now.
    pub(super) fn check_positions(&mut self) {
        let has_lost = lock(&self.shared.state).assignment.lost().next().is_some();
        let has_unknown = self.unknown().next().is_some();
        let is_due = (has_lost || has_unknown) && self.positions_checked_at.elapsed() >= CHECK_POSITIONS;
        if self.has_left || self.is_rebalancing() || !(is_due || self.may_have_lost_positions) {
            return;
        }
        self.positions_checked_at = Instant::now();
        let checked = self.changed_positions().map(|changed| {
            self.may_have_lost_positions = false;
            if !changed.is_empty() {
                self.read_again(changed);
            }
        });
        if let Err(error) = checked.and_then(|()| self.read_unknown()) {
            tracing::warn!(group = self.shared.group, %error, "failed to check the positions of a group; trying again");
        }
    }

    fn changed_positions(&self) -> KafkaResult<Vec<TopicPartition>> {
        let (owned, lost): (Vec<i64>, BTreeSet<i64>) = {
            let state = lock(&self.shared.state);
            (state.assignment.ids().collect(), state.assignment.lost().collect())
        };
        let names: Vec<_> = owned.iter().map(|id| self.names[*id as usize].clone()).collect();
        let reading = self.consumer.position()?;
        let mut changed = Vec::new();
        for (partition, position) in self.positions(&names)?.positions {
            let was_lost = self.ids.get(&partition).is_some_and(|id| lost.contains(id));
            let is_lost = match was_lost {
                true => position.is_lost(),
                false => {
                    // The client may have read further than the group has done.
                    let read = reading.find_partition(&partition.0, partition.1).map(|element| element.offset());
                    let is_read_lost =
                        matches!(read, Some(Offset::Offset(offset)) if !position.bounds.contains(offset));
                    position.is_lost() || is_read_lost
                }
            };
            if is_lost != was_lost {
                changed.push(partition);
            }
        }
        Ok(changed)
    }

    /// Carries out the resets that operators asked for. A rebalance comes first.
    pub(super) fn reset_positions(&mut self) {
        while !self.is_rebalancing()
            && let Some(Reset { partition, to, answer }) = self.resets.pop()
        {
            // The caller may have stopped to wait.
            let _ = answer.send(self.reset(partition, to));
        }
    }

    fn reset(&mut self, partition: TopicPartition, to: ResetTo) -> Result<(), StoreError> {
        let error = |error| failed(RESETTING, error);
        let partitions = [partition];
        let found = bounds(&self.consumer, &partitions).map_err(error)?;
        let [partition] = partitions;
        let Some(bounds) = found.get(&partition) else { return Ok(()) };
        let is_owned = self.ids.get(&partition).is_some_and(|id| lock(&self.shared.state).assignment.has(*id));
        if !is_owned {
            let committed = committed(&self.consumer, std::slice::from_ref(&partition)).map_err(error)?;
            // The consumer that reads a partition commits its own position. Only one whose position is lost looks for
            // another one.
            if committed
                .iter()
                .any(|(_, progress)| progress.as_ref().is_some_and(|progress| bounds.contains(progress.watermark())))
            {
                let (topic, number) = &partition;
                let why = format!("another server reads partition {number} of {topic}: send the reset to that server");
                return Err(StoreError::new(RESETTING, FaultKind::Permanent, why));
            }
        }
        let commit = commit::at(&partition, bounds.at(to)).map_err(error)?;
        if is_owned {
            self.give_up(&self.ids_of(std::slice::from_ref(&partition)).into_iter().collect());
        }
        let committed = self.consumer.commit(&commit, CommitMode::Sync);
        if is_owned {
            self.assigning = Some(vec![partition]);
            self.finish_assignment();
        }
        committed.map_err(error)
    }
}

/// Partitions that the cluster has revoked.
pub(super) struct Revoking {
    pub(super) partitions: Vec<TopicPartition>,
    /// They are given up at this time, whatever is in flight.
    until: tokio::time::Instant,
}

/// Where a group continues.
struct Found {
    positions: Vec<(TopicPartition, Position)>,
    /// The partitions whose position the cluster does not tell now, and why.
    unknown: BTreeMap<TopicPartition, String>,
}

/// Where a group continues in a partition.
struct Position {
    progress: Progress,
    bounds: Bounds,
    /// The group has never committed a position.
    is_new: bool,
}

impl Position {
    fn is_lost(&self) -> bool {
        !self.bounds.contains(self.progress.watermark())
    }
}
