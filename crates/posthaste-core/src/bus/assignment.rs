use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use tokio::time::Instant;

use super::Position;
use crate::metric_names::PAUSED_PARTITIONS;
use crate::{ClaimToken, Claims, Progress};

/// The longest run in the text of a completed set, with a space: two numbers of ten digits and a plus sign.
const LONGEST_RUN: usize = 22;

/// The partitions that a consumer has leased, and its progress in each. The keys are the ids of partitions in the
/// store.
///
/// A commit carries the completed set of a partition as text, and the bus limits the length of that text. A partition is
/// paused when more records in flight could make the text longer than that.
pub struct Assignment {
    group: String,
    max_completed_text: usize,
    partitions: Claims<i64, AssignedPartition>,
    ids: HashMap<(Arc<str>, u32), i64>,
    fetch_order: VecDeque<i64>,
}

/// A partition that a consumer has leased.
pub struct AssignedPartition {
    state: PartitionState,
    topic: Arc<str>,
    partition: u32,
    generation: i64,
    /// The progress that is in the store or on its way to it.
    progress: Progress,
    completed_text: usize,
    is_paused: bool,
    /// The lowest offset that was not handed out in this generation.
    next: i64,
    /// The offsets that were handed out and neither acked nor released.
    outstanding: HashSet<i64>,
}

#[derive(Clone, Copy, PartialEq)]
enum PartitionState {
    Reading,
    /// The position of the group does not exist. Nothing is read until an operator resets it.
    PositionLost,
    /// Another consumer gets the partition. Nothing new is started, and records in flight may be acked until then.
    Revoked {
        until: Instant,
    },
}

/// The progress of one partition, to be recorded.
#[derive(Clone, Debug)]
pub struct Advance {
    /// The partition.
    pub partition_id: i64,
    /// The generation of the lease under which the records were read.
    pub generation: i64,
    /// The progress after the acks are recorded.
    pub progress: Progress,
}

impl AssignedPartition {
    /// A partition that was leased under this generation, with the progress that is in the store.
    pub fn new(topic: String, partition: u32, generation: i64, progress: Progress) -> Self {
        let (next, completed_text) = (progress.watermark(), progress.encode().len());
        let (topic, state, outstanding) = (topic.into(), PartitionState::Reading, HashSet::new());
        Self { state, topic, partition, generation, progress, completed_text, is_paused: false, next, outstanding }
    }

    /// A partition whose position does not exist: `first..=next` are the positions that do.
    pub fn position_lost(self, group: &str, first: i64, next: i64) -> Self {
        tracing::error!(
            group,
            topic = &*self.topic,
            partition = self.partition,
            position = self.progress.watermark(),
            first,
            next,
            "the position of the group does not exist: the partition is not read until an operator resets the position"
        );
        Self { state: PartitionState::PositionLost, ..self }
    }

    /// True if records are handed out now, and this offset was not handed out yet.
    fn may_hand_out(&self, offset: i64) -> bool {
        self.state == PartitionState::Reading && !self.is_paused && self.next <= offset
    }

    /// True if the text of the completed set could exceed the limit, in whatever order the records in flight are done.
    ///
    /// Each of them adds at most one run to the text. The other form of the text has one bit for each offset.
    fn could_exceed(&self, max_completed_text: usize) -> bool {
        let offsets = usize::try_from(self.next - self.progress.watermark()).unwrap_or_default();
        let as_bits = offsets.div_ceil(6) + 4;
        let as_runs = self.completed_text + self.outstanding.len() * LONGEST_RUN;
        as_bits.min(as_runs) > max_completed_text
    }

    /// Pauses or resumes the partition. Returns true if that is a change.
    fn update_pause(&mut self, max_completed_text: usize, group: &str) -> bool {
        let could_exceed = self.could_exceed(max_completed_text);
        if could_exceed == self.is_paused {
            return false;
        }
        self.is_paused = could_exceed;
        let (topic, partition, offset) = (&*self.topic, self.partition, self.progress.watermark());
        match could_exceed {
            true => tracing::warn!(
                group,
                topic,
                partition,
                offset,
                "the partition is paused: too many records were done out of order; it waits for this offset"
            ),
            false => tracing::info!(group, topic, partition, "the partition is read again"),
        }
        true
    }
}

/// A partition is leased as a whole, so the generation of its lease identifies the claim.
fn token(generation: i64) -> ClaimToken {
    ClaimToken { number: 0, generation }
}

impl Assignment {
    /// Nothing is assigned yet. The text of a completed set is at most `max_completed_text` bytes long.
    pub fn new(group: impl Into<String>, max_completed_text: usize) -> Self {
        Self {
            group: group.into(),
            max_completed_text,
            partitions: Claims::default(),
            ids: HashMap::new(),
            fetch_order: VecDeque::new(),
        }
    }

    /// True if the partition is assigned under this generation.
    pub fn contains(&self, id: i64, generation: i64) -> bool {
        self.partitions.get(&id, token(generation)).is_some()
    }

    /// Adds a partition that the consumer has leased, at least until this time.
    pub fn insert(&mut self, id: i64, partition: AssignedPartition, until: Instant) {
        self.ids.insert((Arc::clone(&partition.topic), partition.partition), id);
        if self.partitions.insert(id, token(partition.generation), until, partition).is_none() {
            self.fetch_order.push_back(id);
        }
        self.count_paused();
    }

    /// True if the partition is assigned.
    pub fn has(&self, id: i64) -> bool {
        self.partitions.contains(&id)
    }

    /// The generation under which a partition is assigned.
    pub fn generation_of(&self, id: i64) -> Option<i64> {
        self.partitions.value(&id).map(|partition| partition.generation)
    }

    /// The progress of a partition, with all acks.
    pub fn progress_of(&self, id: i64) -> Option<&Progress> {
        self.partitions.value(&id).map(|partition| &partition.progress)
    }

    /// The lowest offset of a partition that was not handed out.
    pub fn next_offset(&self, id: i64) -> Option<i64> {
        self.partitions.value(&id).map(|partition| partition.next)
    }

    /// All partitions.
    pub fn ids(&self) -> impl Iterator<Item = i64> {
        self.fetch_order.iter().copied()
    }

    /// The partitions of which nothing may be read now: paused, revoked, or without a position.
    pub fn unreadable(&self) -> impl Iterator<Item = i64> {
        let is_unreadable =
            |partition: &AssignedPartition| partition.state != PartitionState::Reading || partition.is_paused;
        self.partitions.iter().filter(move |(_, partition)| is_unreadable(partition)).map(|(id, _)| *id)
    }

    /// The partitions whose position does not exist.
    pub fn lost(&self) -> impl Iterator<Item = i64> {
        let is_lost = |partition: &AssignedPartition| partition.state == PartitionState::PositionLost;
        self.partitions.iter().filter(move |(_, partition)| is_lost(partition)).map(|(id, _)| *id)
    }

    /// True if no more records of the partition may be handed out, because its completed set could become too long.
    pub fn is_paused(&self, id: i64) -> bool {
        self.partitions.value(&id).is_some_and(|partition| partition.is_paused)
    }

    /// Removes the partitions for which `keep` is false. Returns true if records of them were in flight.
    pub fn retain(&mut self, keep: impl Fn(i64) -> bool) -> bool {
        let mut is_lost = false;
        self.partitions.retain(|&id, _, partition| {
            let is_kept = keep(id);
            is_lost |= !is_kept && !partition.outstanding.is_empty();
            is_kept
        });
        self.ids.retain(|_, &mut id| keep(id));
        self.fetch_order.retain(|&id| keep(id));
        self.count_paused();
        is_lost
    }

    /// Removes a partition whose lease of this generation is lost. A partition that was leased again under a later
    /// generation stays.
    pub fn remove(&mut self, id: i64, generation: i64) {
        if self.contains(id, generation) {
            self.retain(|other| other != id);
        }
    }

    /// The partition of this position, if it is assigned under the generation of the position.
    pub fn id_of(&self, position: &Position) -> Option<i64> {
        let id = *self.ids.get(&(Arc::clone(&position.topic), position.partition))?;
        self.contains(id, position.generation).then_some(id)
    }

    /// An advance of this partition that completes nothing yet.
    pub fn advance(&self, id: i64, generation: i64) -> Option<Advance> {
        let partition = self.partitions.get(&id, token(generation))?;
        Some(Advance { partition_id: id, generation, progress: partition.progress.clone() })
    }

    /// Every partition that may be read now with the first offset to read, in the order of fetching.
    pub fn fetchable(&mut self) -> Vec<(i64, i64)> {
        let mut fetchable = Vec::with_capacity(self.fetch_order.len());
        for id in &self.fetch_order {
            let current = self.partitions.current(id).map(|(_, partition)| partition);
            let is_read =
                |partition: &&mut AssignedPartition| partition.state == PartitionState::Reading && !partition.is_paused;
            if let Some(partition) = current.filter(is_read) {
                while partition.progress.is_done(partition.next) {
                    partition.next += 1;
                }
                fetchable.push((*id, partition.next));
            }
        }
        fetchable
    }

    /// The partition has no records between the last one that was handed out and this offset. They count as done.
    /// Returns true if that is progress.
    pub fn skip_missing(&mut self, id: i64, offset: i64) -> bool {
        let next = self.partitions.current(&id).filter(|(_, partition)| partition.may_hand_out(offset));
        let Some((_, partition)) = next else { return false };
        let before = std::mem::replace(&mut partition.next, offset);
        if (before..offset).all(|offset| partition.progress.is_done(offset)) {
            return false;
        }
        partition.progress.complete_range(before, offset);
        partition.completed_text = partition.progress.encode().len();
        true
    }

    /// Marks a record as handed out and returns its position; `None` if it was done or handed out before.
    pub fn hand_out(&mut self, id: i64, offset: i64) -> Option<Position> {
        let (_, partition) = self.partitions.current(&id).filter(|(_, partition)| partition.may_hand_out(offset))?;
        partition.next = offset + 1;
        if partition.progress.is_done(offset) {
            return None;
        }
        partition.outstanding.insert(offset);
        let (topic, number, generation) = (Arc::clone(&partition.topic), partition.partition, partition.generation);
        if partition.update_pause(self.max_completed_text, &self.group) {
            self.count_paused();
        }
        Some(Position { topic, partition: number, offset, generation })
    }

    /// The records were acked, or they will not be delivered by this consumer.
    pub fn release(&mut self, positions: &[&Position]) {
        for position in positions {
            let id = self.id_of(position);
            if let Some(partition) = id.and_then(|id| self.partitions.get_mut(&id, token(position.generation))) {
                partition.outstanding.remove(&position.offset);
            }
        }
    }

    /// True if the delivery of this record may start: its partition is assigned and not revoked.
    pub fn may_start(&self, position: &Position) -> bool {
        let id = self.id_of(position);
        let partition = id.and_then(|id| self.partitions.get(&id, token(position.generation)));
        partition.is_some_and(|partition| !matches!(partition.state, PartitionState::Revoked { .. }))
    }

    /// How many partitions are assigned and not revoked.
    pub fn kept(&self) -> usize {
        let is_kept = |partition: &AssignedPartition| !matches!(partition.state, PartitionState::Revoked { .. });
        self.partitions.iter().filter(|(_, partition)| is_kept(partition)).count()
    }

    /// Revokes these partitions. Their records in flight may be acked until `until`.
    pub fn revoke(&mut self, ids: &[i64], until: Instant) {
        for id in ids {
            if let Some((_, partition)) = self.partitions.current(id) {
                partition.state = PartitionState::Revoked { until };
            }
        }
    }

    /// Revokes partitions until at most `share` are kept. Their records in flight may be acked until `until`. Returns
    /// true if there were such partitions.
    pub fn revoke_beyond(&mut self, share: usize, until: Instant) -> bool {
        let mut excess = self.kept().saturating_sub(share);
        let is_revoked = excess > 0;
        // From the back: the partitions that were added last.
        for id in self.fetch_order.iter().rev() {
            let Some((_, partition)) = self.partitions.current(id).filter(|_| excess > 0) else { continue };
            if !matches!(partition.state, PartitionState::Revoked { .. }) {
                partition.state = PartitionState::Revoked { until };
                excess -= 1;
            }
        }
        is_revoked
    }

    /// The revoked partitions of which nothing is in flight any more, or whose time is over. Returns true if records of
    /// them are still in flight.
    pub fn drained(&self, now: Instant) -> (Vec<i64>, bool) {
        let (mut drained, mut is_lost) = (Vec::new(), false);
        for (&id, partition) in self.partitions.iter() {
            let PartitionState::Revoked { until } = partition.state else { continue };
            if partition.outstanding.is_empty() || until <= now {
                drained.push(id);
                is_lost |= !partition.outstanding.is_empty();
            }
        }
        (drained, is_lost)
    }

    /// The partition filled a whole fetch: the next fetch begins with the partitions after it.
    pub fn move_to_back(&mut self, id: i64) {
        if let Some(at) = self.fetch_order.iter().position(|&other| other == id) {
            self.fetch_order.rotate_left(at + 1);
        }
    }

    /// Remembers progress that is in the store or on its way to it. Returns true if a paused partition may be read again.
    pub fn recorded(&mut self, advance: Advance) -> bool {
        let token = token(advance.generation);
        let Some(partition) = self.partitions.get_mut(&advance.partition_id, token) else {
            return false;
        };
        partition.completed_text = advance.progress.encode().len();
        partition.progress = advance.progress;
        let is_changed = partition.update_pause(self.max_completed_text, &self.group);
        let is_read_again = is_changed && !partition.is_paused;
        if is_changed {
            self.count_paused();
        }
        is_read_again
    }

    fn count_paused(&self) {
        let paused = self.partitions.iter().filter(|(_, partition)| partition.is_paused);
        metrics::gauge!(PAUSED_PARTITIONS, "group" => self.group.clone()).set(paused.count() as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assignment(partitions: impl IntoIterator<Item = (i64, Progress)>) -> Assignment {
        let mut assignment = Assignment::new("group", 100);
        for (id, progress) in partitions {
            let partition = AssignedPartition::new("t".to_owned(), id as u32, 1, progress);
            assignment.insert(id, partition, Instant::now());
        }
        assignment
    }

    #[tokio::test]
    async fn a_partition_that_filled_a_fetch_is_read_last_by_the_next_fetch() {
        let mut assignment = assignment((1..=3).map(|id| (id, Progress::at(0))));
        assignment.move_to_back(1);
        assert_eq!(assignment.fetchable(), [(2, 0), (3, 0), (1, 0)]);
        assignment.move_to_back(3);
        assert_eq!(assignment.fetchable(), [(1, 0), (2, 0), (3, 0)]);
    }

    #[tokio::test]
    async fn a_completed_record_is_neither_fetched_nor_handed_out() {
        let mut assignment = assignment([(1, Progress::decode(2, "1+1 1+2").unwrap())]);
        let mut handed_out = Vec::new();
        for offset in 2..8 {
            handed_out.extend(assignment.hand_out(1, offset).map(|position| position.offset));
        }
        assert_eq!(handed_out, [2, 4, 7]);
        assert!(assignment.hand_out(1, 4).is_none(), "handed out twice");
    }

    #[tokio::test]
    async fn offsets_that_do_not_exist_count_as_done() {
        let mut assignment = assignment([(1, Progress::decode(2, "1+1").unwrap())]);
        assert!(assignment.skip_missing(1, 3), "offset 2 does not exist");
        assert!(!assignment.skip_missing(1, 4), "offset 3 was done");
        assert_eq!(assignment.hand_out(1, 4).unwrap().offset, 4);
        assert!(assignment.skip_missing(1, 1_000_000));
        assert!(!assignment.skip_missing(1, 10), "it is behind");
        assert_eq!(assignment.hand_out(1, 1_000_000).unwrap().offset, 1_000_000);
        let mut advance = assignment.advance(1, 1).unwrap();
        assert_eq!(advance.progress.watermark(), 4, "a record in flight is not done");
        advance.progress.complete(4);
        assert_eq!(advance.progress.watermark(), 1_000_000);
    }

    #[tokio::test]
    async fn a_partition_is_paused_while_its_completed_set_could_become_too_long() {
        let mut assignment = assignment([(1, Progress::at(0)), (2, Progress::at(0))]);
        let handed_out: Vec<i64> =
            (0..10_000).filter_map(|offset| assignment.hand_out(1, offset)).map(|position| position.offset).collect();
        let count = handed_out.len() as i64;
        assert!((500..600).contains(&count), "one bit for each offset, six in a character of the text: {count}");
        assert_eq!(assignment.fetchable(), [(2, 0)], "only the other partition is read");
        // Every second record is done, the first one is not.
        let mut advance = assignment.advance(1, 1).unwrap();
        (1..count).step_by(2).for_each(|offset| advance.progress.complete(offset));
        assert!(!assignment.recorded(advance.clone()), "it stays paused");
        assert!(advance.progress.encode().len() <= 100, "the text is not longer than the limit");
        (0..count).for_each(|offset| advance.progress.complete(offset));
        assert!(assignment.recorded(advance), "it may be read again");
        assert_eq!(assignment.fetchable(), [(1, count), (2, 0)]);
    }

    #[tokio::test]
    async fn a_record_that_hangs_does_not_pause_a_partition_whose_other_records_are_done() {
        let mut assignment = assignment([(1, Progress::at(0))]);
        assert!(assignment.hand_out(1, 0).is_some());
        for offset in 1..10_000 {
            let position = assignment.hand_out(1, offset).unwrap();
            let mut advance = assignment.advance(1, 1).unwrap();
            advance.progress.complete(offset);
            assignment.release(&[&position]);
            assignment.recorded(advance);
        }
        assert_eq!(assignment.fetchable(), [(1, 10_000)]);
    }

    #[tokio::test]
    async fn the_loss_of_an_old_lease_leaves_the_new_one_alone() {
        let mut assignment = assignment([(1, Progress::at(0))]);
        assignment.insert(1, AssignedPartition::new("t".to_owned(), 1, 2, Progress::at(0)), Instant::now());
        assignment.remove(1, 1);
        assert!(assignment.contains(1, 2) && !assignment.contains(1, 1));
        assignment.remove(1, 2);
        assert!(assignment.fetchable().is_empty());
    }
}
