use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use tokio::time::Instant;

use super::Position;
use crate::{ClaimToken, Claims, Progress};

/// The longest text of a completed set. A partition whose text is longer is paused, because every ack writes the text.
/// The limit is enough for gaps anywhere among about a hundred thousand records.
const MAX_COMPLETED_TEXT: usize = 16_384;

/// The partitions that a consumer has leased, and its progress in each. The keys are the ids of partitions in the
/// store.
#[derive(Default)]
pub struct Assignment {
    partitions: Claims<i64, AssignedPartition>,
    ids: HashMap<(Arc<str>, u32), i64>,
    fetch_order: VecDeque<i64>,
}

/// A partition that a consumer has leased.
pub struct AssignedPartition {
    topic: Arc<str>,
    partition: u32,
    generation: i64,
    /// The progress that is in the store.
    progress: Progress,
    completed_text: usize,
    /// The lowest offset that was not handed out in this generation.
    next: i64,
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
        Self { topic: topic.into(), partition, generation, progress, completed_text, next }
    }

    fn is_paused(&self) -> bool {
        self.completed_text > MAX_COMPLETED_TEXT
    }
}

/// A partition is leased as a whole, so the generation of its lease identifies the claim.
fn token(generation: i64) -> ClaimToken {
    ClaimToken { number: 0, generation }
}

impl Assignment {
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
    }

    /// Removes the partitions for which `keep` is false.
    pub fn retain(&mut self, keep: impl Fn(i64) -> bool) {
        self.partitions.retain(|&id, _, _| keep(id));
        self.ids.retain(|_, &mut id| keep(id));
        self.fetch_order.retain(|&id| keep(id));
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
            if let Some(partition) = current.filter(|partition| !partition.is_paused()) {
                while partition.progress.is_done(partition.next) {
                    partition.next += 1;
                }
                fetchable.push((*id, partition.next));
            }
        }
        fetchable
    }

    /// Marks a record as handed out and returns its position; `None` if it was done or handed out before.
    pub fn hand_out(&mut self, id: i64, offset: i64) -> Option<Position> {
        let (_, partition) = self.partitions.current(&id).filter(|(_, partition)| partition.next <= offset)?;
        partition.next = offset + 1;
        let position = || Position {
            topic: Arc::clone(&partition.topic),
            partition: partition.partition,
            offset,
            generation: partition.generation,
        };
        (!partition.progress.is_done(offset)).then(position)
    }

    /// The partition filled a whole fetch: the next fetch begins with the partitions after it.
    pub fn move_to_back(&mut self, id: i64) {
        if let Some(at) = self.fetch_order.iter().position(|&other| other == id) {
            self.fetch_order.rotate_left(at + 1);
        }
    }

    /// Remembers progress that is in the store now. Returns true if a paused partition may be read again.
    pub fn recorded(&mut self, advance: Advance) -> bool {
        let Some(partition) = self.partitions.get_mut(&advance.partition_id, token(advance.generation)) else {
            return false;
        };
        let was_paused = partition.is_paused();
        partition.completed_text = advance.progress.encode().len();
        partition.progress = advance.progress;
        was_paused && !partition.is_paused()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assignment(partitions: impl IntoIterator<Item = (i64, Progress)>) -> Assignment {
        let mut assignment = Assignment::default();
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
    async fn the_loss_of_an_old_lease_leaves_the_new_one_alone() {
        let mut assignment = assignment([(1, Progress::at(0))]);
        assignment.insert(1, AssignedPartition::new("t".to_owned(), 1, 2, Progress::at(0)), Instant::now());
        assignment.remove(1, 1);
        assert!(assignment.contains(1, 2) && !assignment.contains(1, 1));
        assignment.remove(1, 2);
        assert!(assignment.fetchable().is_empty());
    }
}
