//! How far a consumer reads ahead.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use posthaste_core::lock;
use rdkafka::TopicPartitionList;
use rdkafka::consumer::Consumer;
use rdkafka::error::KafkaResult;
use rdkafka::topic_partition_list::Offset;

use super::Poller;
use crate::positions::{TIMEOUT, list};

/// While this much waits in the buffer, no more is read.
const MAX_BUFFERED: usize = 20_000;
const MAX_BUFFERED_BYTES: usize = 32 * 1024 * 1024;
/// How often a consumer looks if there are offsets without records at the ends of its partitions.
const SKIP_ENDS: Duration = Duration::from_secs(1);

impl Poller {
    /// Stops to read while the buffer is full, and partitions of which nothing may be handed out.
    pub(super) fn pause_and_resume(&mut self) {
        self.drop_blocked();
        let to_pause: BTreeSet<i64> = {
            let state = lock(&self.shared.state);
            let was_full = !self.paused.is_empty() && state.has_buffered(MAX_BUFFERED / 2, MAX_BUFFERED_BYTES / 2);
            let is_known = |id: &i64| !self.unread.contains(id);
            match was_full || state.has_buffered(MAX_BUFFERED, MAX_BUFFERED_BYTES) {
                true => state.assignment.ids().filter(is_known).collect(),
                false => state.assignment.unreadable().chain(state.blocked()).filter(is_known).collect(),
            }
        };
        if let Err(error) = self.change_paused(to_pause) {
            tracing::warn!(group = self.shared.group, %error, "failed to pause or resume partitions");
        }
    }

    fn change_paused(&mut self, to_pause: BTreeSet<i64>) -> KafkaResult<()> {
        let owned = |id: &&i64| lock(&self.shared.state).assignment.has(**id);
        let resume: BTreeSet<i64> = self.paused.difference(&to_pause).filter(owned).copied().collect();
        let pause: Vec<_> = to_pause.difference(&self.paused).map(|id| self.names[*id as usize].clone()).collect();
        if !pause.is_empty() {
            self.consumer.pause(&list(&pause))?;
        }
        self.read_dropped_again(&resume)?;
        let resume: Vec<_> = resume.iter().map(|id| self.names[*id as usize].clone()).collect();
        if !resume.is_empty() {
            self.consumer.resume(&list(&resume))?;
        }
        self.paused = to_pause;
        Ok(())
    }

    /// Makes room in a full buffer for partitions that are read: the records of paused partitions could fill it for as
    /// long as they are paused. The client reads them again later.
    fn drop_blocked(&mut self) {
        let mut state = lock(&self.shared.state);
        if !state.has_buffered(MAX_BUFFERED / 2, MAX_BUFFERED_BYTES / 2) {
            return;
        }
        // The client returns nothing of a partition that it has paused.
        let blocked: BTreeSet<i64> = state.blocked().filter(|id| self.paused.contains(id)).collect();
        self.dropped.extend(state.drop_buffered(&blocked));
    }

    /// Moves the client back to the first record of each of these partitions that was not handed out, if records were
    /// dropped. They are paused.
    fn read_dropped_again(&mut self, partitions: &BTreeSet<i64>) -> KafkaResult<()> {
        let dropped: BTreeSet<i64> = self.dropped.intersection(partitions).copied().collect();
        if dropped.is_empty() {
            return Ok(());
        }
        let mut positions = TopicPartitionList::new();
        for id in &dropped {
            let next = lock(&self.shared.state).assignment.next_offset(*id);
            let (topic, partition) = &self.names[*id as usize];
            if let Some(next) = next {
                positions.add_partition_offset(topic, *partition, Offset::Offset(next))?;
            }
        }
        for element in self.consumer.seek_partitions(positions, TIMEOUT)?.elements() {
            element.error()?;
        }
        self.dropped.retain(|id| !dropped.contains(id));
        Ok(())
    }

    /// Counts offsets without records at the ends of partitions as done. A transaction of another program ends with such
    /// an offset: without this, its partition would have a backlog until the next record.
    ///
    /// The client has returned every record below its position. If none of them waits in the buffer, all were handed out.
    pub(super) fn skip_unseen_ends(&mut self) {
        if self.is_rebalancing() || self.ends_skipped_at.elapsed() < SKIP_ENDS {
            return;
        }
        self.ends_skipped_at = Instant::now();
        let Ok(reading) = self.consumer.position() else { return };
        let mut state = lock(&self.shared.state);
        let buffered: BTreeSet<i64> = state.buffer.iter().map(|record| record.partition_id).collect();
        for element in reading.elements() {
            let id = self.ids.get(&(element.topic().to_owned(), element.partition()));
            let (Some(id), Offset::Offset(position)) = (id, element.offset()) else { continue };
            let is_old = self.positions_before.get(id) == Some(&position);
            if buffered.contains(id) || self.dropped.contains(id) || is_old {
                continue;
            }
            if state.assignment.skip_missing(*id, position) {
                state.uncommitted.add([*id], Instant::now());
            }
        }
    }
}
