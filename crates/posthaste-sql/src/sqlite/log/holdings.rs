use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use posthaste_core::Progress;
use posthaste_core::bus::Position;

use super::leases::Advance;

/// How long the text of a partition's completed set may be before nothing new is read from that partition: every ack
/// writes it. It is enough for holes anywhere among about a hundred thousand records.
const MAX_COMPLETED_TEXT: usize = 16_384;

/// The partitions that a consumer holds, and how far it is in each.
#[derive(Default)]
pub(super) struct Holdings {
    partitions: HashMap<i64, Held>,
    ids: HashMap<(Arc<str>, u32), i64>,
    /// The order in which the next fetch looks at them.
    turns: VecDeque<i64>,
}

pub(super) struct Held {
    pub(super) topic: Arc<str>,
    pub(super) partition: u32,
    pub(super) generation: i64,
    /// As it is in the table.
    pub(super) progress: Progress,
    completed_text: usize,
    /// The lowest offset that was not handed out in this generation.
    next: i64,
}

impl Held {
    pub(super) fn new(topic: String, partition: u32, generation: i64, progress: Progress) -> Self {
        let (next, completed_text) = (progress.watermark(), progress.encode().len());
        Self { topic: topic.into(), partition, generation, progress, completed_text, next }
    }

    fn is_paused(&self) -> bool {
        self.completed_text > MAX_COMPLETED_TEXT
    }
}

impl Holdings {
    pub(super) fn generation(&self, id: i64) -> Option<i64> {
        self.partitions.get(&id).map(|held| held.generation)
    }

    pub(super) fn insert(&mut self, id: i64, held: Held) {
        self.ids.insert((Arc::clone(&held.topic), held.partition), id);
        if self.partitions.insert(id, held).is_none() {
            self.turns.push_back(id);
        }
    }

    pub(super) fn retain(&mut self, keep: impl Fn(i64) -> bool) {
        self.partitions.retain(|&id, _| keep(id));
        self.ids.retain(|_, &mut id| keep(id));
        self.turns.retain(|&id| keep(id));
    }

    /// Somebody else has the partition now, unless it is held again under a later generation.
    pub(super) fn forget(&mut self, id: i64, generation: i64) {
        if self.generation(id) == Some(generation) {
            self.retain(|other| other != id);
        }
    }

    /// Where this position's partition is held, if it is still held as it was when the position was handed out.
    pub(super) fn find(&self, position: &Position) -> Option<(i64, &Held)> {
        let id = *self.ids.get(&(Arc::clone(&position.topic), position.partition))?;
        let held = self.partitions.get(&id)?;
        (held.generation == position.generation).then_some((id, held))
    }

    /// Partition and first wanted offset of all that may be read now, in the order of their turns.
    pub(super) fn wanted(&mut self) -> Vec<(i64, i64)> {
        let mut wanted = Vec::with_capacity(self.turns.len());
        for id in &self.turns {
            if let Some(held) = self.partitions.get_mut(id).filter(|held| !held.is_paused()) {
                while held.progress.is_done(held.next) {
                    held.next += 1;
                }
                wanted.push((*id, held.next));
            }
        }
        wanted
    }

    /// Marks a record as handed out and says under which position; `None` when it must not be.
    pub(super) fn hand_out(&mut self, id: i64, offset: i64) -> Option<Position> {
        let held = self.partitions.get_mut(&id).filter(|held| held.next <= offset)?;
        held.next = offset + 1;
        let position = || Position {
            topic: Arc::clone(&held.topic),
            partition: held.partition,
            offset,
            generation: held.generation,
        };
        (!held.progress.is_done(offset)).then(position)
    }

    /// The partition filled a whole fetch: those behind it come first next time.
    pub(super) fn took_its_turn(&mut self, id: i64) {
        if let Some(at) = self.turns.iter().position(|&turn| turn == id) {
            self.turns.rotate_left(at + 1);
        }
    }

    /// Keeps what was recorded in the table; true when that lets a paused partition go on.
    pub(super) fn recorded(&mut self, advance: Advance) -> bool {
        let same = |held: &&mut Held| held.generation == advance.generation;
        let Some(held) = self.partitions.get_mut(&advance.partition_id).filter(same) else {
            return false;
        };
        let was_paused = held.is_paused();
        held.completed_text = advance.progress.encode().len();
        held.progress = advance.progress;
        was_paused && !held.is_paused()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_partition_goes_to_the_end_of_the_line() {
        let mut holdings = Holdings::default();
        for id in 1..=3 {
            holdings.insert(id, Held::new("t".to_owned(), id as u32, 1, Progress::at(0)));
        }
        holdings.took_its_turn(1);
        assert_eq!(holdings.wanted(), [(2, 0), (3, 0), (1, 0)]);
        holdings.took_its_turn(3);
        assert_eq!(holdings.wanted(), [(1, 0), (2, 0), (3, 0)]);
    }

    #[test]
    fn what_is_done_is_neither_wanted_nor_handed_out() {
        let mut holdings = Holdings::default();
        holdings.insert(1, Held::new("t".to_owned(), 0, 1, Progress::decode(2, "1+1 1+2").unwrap()));
        let mut handed_out = Vec::new();
        for offset in 2..8 {
            handed_out.extend(holdings.hand_out(1, offset).map(|position| position.offset));
        }
        assert_eq!(handed_out, [2, 4, 7]);
        assert!(holdings.hand_out(1, 4).is_none(), "handed out twice");
    }
}
