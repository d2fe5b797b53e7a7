use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use posthaste_core::bus::{Assignment, Consumer, Fetched, Position, Topics};
use posthaste_core::hub_store::ResetTo;
use posthaste_core::{FaultKind, Settled, StoreError, Wakeup, lock};
use tokio::sync::oneshot;

use crate::commit::MAX_COMPLETED_TEXT;
use crate::options::KafkaOptions;
use crate::poller::{self, RESETTING};
use crate::positions::TopicPartition;
use crate::uncommitted::Uncommitted;

/// The answer of the polling thread to a call.
pub(crate) type Answer = oneshot::Sender<Result<(), StoreError>>;

/// A call that the polling thread has to make.
pub(crate) enum Command {
    /// Commit everything that is acked.
    Flush(Answer),
    /// Commit, so that the cluster confirms that this consumer is a member of the group.
    Renew(Answer),
    /// Move the group to another position in a partition.
    Reset(Reset),
    /// Commit, and leave the group.
    Close(Answer),
}

/// An operator wants the group to go on elsewhere in a partition.
pub(crate) struct Reset {
    pub(crate) partition: TopicPartition,
    pub(crate) to: ResetTo,
    pub(crate) answer: Answer,
}

/// A record that was read and not handed out yet.
pub(crate) struct Buffered {
    pub(crate) partition_id: i64,
    pub(crate) generation: i64,
    pub(crate) offset: i64,
    /// When it was appended, in milliseconds since 1970.
    pub(crate) appended_at: i64,
    pub(crate) key: String,
    pub(crate) value: bytes::Bytes,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) damage: Option<String>,
}

impl Buffered {
    pub(crate) fn size(&self) -> usize {
        let headers = self.headers.iter().map(|(name, value)| name.len() + value.len());
        self.key.len() + self.value.len() + headers.sum::<usize>()
    }
}

/// What the handle of a consumer and its polling thread share.
pub(crate) struct Shared {
    pub(crate) group: String,
    pub(crate) lease: Duration,
    pub(crate) state: Mutex<State>,
    pub(crate) wakeup: Wakeup,
    pub(crate) revocations: Wakeup,
}

pub(crate) struct State {
    pub(crate) assignment: Assignment,
    pub(crate) buffer: VecDeque<Buffered>,
    pub(crate) buffered_bytes: usize,
    /// When each record that was read and is not acked was appended, by partition and offset.
    pub(crate) appended_at: HashMap<(i64, i64), i64>,
    /// Partitions with progress that is not committed.
    pub(crate) uncommitted: Uncommitted,
    /// Partitions whose commits the cluster refuses, for example because it withdrew a right.
    pub(crate) refused: BTreeSet<i64>,
    pub(crate) is_closed: bool,
    /// Why the client can do nothing any more, for example because another process uses its `group.instance.id`.
    pub(crate) fatal: Option<String>,
    /// When the consumer was last used.
    pub(crate) used_at: Instant,
}

impl State {
    fn new(group: &str) -> Self {
        Self {
            assignment: Assignment::new(group, MAX_COMPLETED_TEXT),
            buffer: VecDeque::new(),
            buffered_bytes: 0,
            appended_at: HashMap::new(),
            uncommitted: Uncommitted::default(),
            refused: BTreeSet::new(),
            is_closed: false,
            fatal: None,
            used_at: Instant::now(),
        }
    }

    /// These partitions are not read any more: nothing of them is committed.
    pub(crate) fn forget(&mut self, partitions: &BTreeSet<i64>) {
        self.uncommitted.remove(partitions);
        self.refused.retain(|id| !partitions.contains(id));
        self.appended_at.retain(|(id, _), _| !partitions.contains(id));
    }

    /// True if the consumer has partitions and was not used for longer than a lease, for example because its process was
    /// paused. Others may read its partitions: the polling thread is about to leave the group.
    fn is_expired(&self, lease: Duration) -> bool {
        self.used_at.elapsed() >= lease && self.assignment.ids().next().is_some()
    }

    /// True if earlier acks of these partitions do not become durable: the cluster is out of reach. Then more acks are
    /// refused, so that the engine starts no deliveries, which would all be repeated if the session ended. While
    /// partitions are revoked, acks are accepted, because their commit waits for all of them.
    fn refuses_acks(&self, positions: &[&Position], lease: Duration) -> bool {
        let mut partitions = positions.iter().filter_map(|position| self.assignment.id_of(position));
        partitions.any(|id| self.is_overdue(id, lease) && !self.refused.contains(&id))
    }

    /// True if the cluster refuses the commits of this partition alone. Then the acks of other partitions are accepted.
    fn refuses_acks_of(&self, position: &Position, lease: Duration) -> bool {
        let id = self.assignment.id_of(position);
        id.is_some_and(|id| self.refused.contains(&id) && self.is_overdue(id, lease))
    }

    fn is_overdue(&self, partition: i64, lease: Duration) -> bool {
        let is_revoking = self.assignment.kept() < self.assignment.ids().count();
        self.uncommitted.is_overdue(partition, Instant::now(), lease) && !is_revoking
    }

    /// The partitions of which no record may be handed out now, although they are not revoked.
    pub(crate) fn blocked(&self) -> impl Iterator<Item = i64> {
        self.assignment.ids().filter(|id| self.is_blocked(*id))
    }

    fn is_blocked(&self, partition: i64) -> bool {
        self.assignment.is_paused(partition) || self.refused.contains(&partition)
    }

    /// True if at least so many records or bytes are in the buffer.
    pub(crate) fn has_buffered(&self, records: usize, bytes: usize) -> bool {
        self.buffer.len() >= records || self.buffered_bytes >= bytes
    }

    /// Removes the records of these partitions from the buffer. Returns the partitions that had some.
    pub(crate) fn drop_buffered(&mut self, partitions: &BTreeSet<i64>) -> BTreeSet<i64> {
        let mut dropped = BTreeSet::new();
        let Self { buffer, buffered_bytes, .. } = self;
        buffer.retain(|record| {
            let is_dropped = partitions.contains(&record.partition_id);
            if is_dropped {
                dropped.insert(record.partition_id);
                *buffered_bytes -= record.size();
            }
            !is_dropped
        });
        dropped
    }

    /// The consumer has left the group.
    pub(crate) fn lose_everything(&mut self) {
        self.assignment.retain(|_| false);
        self.uncommitted = Uncommitted::default();
        self.refused.clear();
        self.appended_at.clear();
    }
}

/// One member of a group, as the engine sees it.
pub(crate) struct GroupConsumer {
    member: Arc<LocalMember>,
}

/// A member of a group in this process.
pub(crate) struct LocalMember {
    pub(crate) shared: Arc<Shared>,
    commands: mpsc::Sender<Command>,
}

impl GroupConsumer {
    pub(crate) fn join(options: &KafkaOptions, group: &str, topics: &Topics) -> Result<Self, StoreError> {
        let shared = Arc::new(Shared {
            group: group.to_owned(),
            lease: options.lease(),
            state: Mutex::new(State::new(group)),
            wakeup: Wakeup::default(),
            revocations: Wakeup::default(),
        });
        let (commands, receiver) = mpsc::channel();
        poller::start(options, topics, Arc::clone(&shared), receiver)?;
        Ok(Self { member: Arc::new(LocalMember { shared, commands }) })
    }

    pub(crate) fn member(&self) -> &Arc<LocalMember> {
        &self.member
    }
}

impl LocalMember {
    /// Moves the group to another position in a partition.
    pub(crate) async fn reset(&self, partition: TopicPartition, to: ResetTo) -> Result<(), StoreError> {
        self.call(RESETTING, |answer| Command::Reset(Reset { partition, to, answer })).await
    }

    async fn call(&self, doing: &'static str, command: impl FnOnce(Answer) -> Command) -> Result<(), StoreError> {
        let stopped = || StoreError::new(doing, FaultKind::Transient, "the consumer is closed");
        let (answer, answered) = oneshot::channel();
        self.commands.send(command(answer)).map_err(|_| stopped())?;
        answered.await.unwrap_or_else(|_| Err(stopped()))
    }
}

impl Shared {
    /// Adds acks to the progress of their partitions. The polling thread commits them.
    fn accept(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        let mut state = lock(&self.state);
        if state.is_expired(self.lease) {
            return Ok(vec![Settled::LostLease; positions.len()]);
        }
        if state.refuses_acks(positions, self.lease) {
            let why = "earlier acks could not be committed for longer than a lease";
            return Err(StoreError::new("ack to Kafka", FaultKind::Transient, why));
        }
        state.used_at = Instant::now();
        let refused: Vec<bool> = positions.iter().map(|position| state.refuses_acks_of(position, self.lease)).collect();
        let State { assignment, uncommitted, appended_at, .. } = &mut *state;
        let mut advances = BTreeMap::new();
        let mut settled = Vec::with_capacity(positions.len());
        for (position, is_refused) in positions.iter().zip(refused) {
            if is_refused {
                settled.push(Settled::Locked);
                continue;
            }
            let id = assignment.id_of(position);
            if let Some(id) = id
                && let Some(advance) = assignment.advance(id, position.generation)
            {
                let advance = advances.entry(id).or_insert(advance);
                advance.progress.complete(position.offset);
                appended_at.remove(&(id, position.offset));
            }
            assignment.release(&[position]);
            settled.push(Settled::of(id.is_some()));
        }
        uncommitted.add(advances.keys().copied(), Instant::now());
        let mut may_read_again = false;
        for advance in advances.into_values() {
            may_read_again |= assignment.recorded(advance);
        }
        drop(state);
        if may_read_again {
            self.wakeup.wake();
        }
        Ok(settled)
    }

    fn hand_out(&self, limit: usize) -> Result<Vec<Fetched>, StoreError> {
        let mut state = lock(&self.state);
        if let Some(why) = &state.fatal {
            return Err(StoreError::new("read from Kafka", FaultKind::Permanent, why.clone()));
        }
        if state.is_expired(self.lease) {
            return Ok(Vec::new());
        }
        state.used_at = Instant::now();
        let State { assignment, buffer, buffered_bytes, appended_at, uncommitted, refused, .. } = &mut *state;
        let mut fetched = Vec::new();
        let mut kept = VecDeque::new();
        while fetched.len() < limit
            && let Some(record) = buffer.pop_front()
        {
            if !assignment.contains(record.partition_id, record.generation) {
                *buffered_bytes -= record.size();
                continue;
            }
            if assignment.is_paused(record.partition_id) || refused.contains(&record.partition_id) {
                kept.push_back(record);
                continue;
            }
            *buffered_bytes -= record.size();
            // Records of transactions leave gaps between the offsets, and so does compaction.
            if assignment.skip_missing(record.partition_id, record.offset) {
                uncommitted.add([record.partition_id], Instant::now());
            }
            if let Some(position) = assignment.hand_out(record.partition_id, record.offset) {
                let Buffered { key, value, headers, damage, .. } = record;
                fetched.push(Fetched { position, key, value, headers, damage });
            } else {
                // It was done before.
                appended_at.remove(&(record.partition_id, record.offset));
            }
        }
        // The records of paused partitions come first again, in their order.
        kept.append(buffer);
        *buffer = kept;
        Ok(fetched)
    }
}

#[async_trait]
impl Consumer for GroupConsumer {
    async fn fetch(&self, limit: usize) -> Result<Vec<Fetched>, StoreError> {
        self.member.shared.hand_out(limit)
    }

    async fn ack(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        self.member.shared.accept(positions)
    }

    async fn flush(&self) -> Result<(), StoreError> {
        self.member.call("commit to Kafka", Command::Flush).await
    }

    fn release(&self, positions: &[&Position]) {
        lock(&self.member.shared.state).assignment.release(positions);
    }

    fn may_start(&self, position: &Position) -> bool {
        lock(&self.member.shared.state).assignment.may_start(position)
    }

    async fn renew(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        let are_held = || {
            let mut state = lock(&self.member.shared.state);
            if state.is_expired(self.lease()) {
                return vec![Settled::LostLease; positions.len()];
            }
            state.used_at = Instant::now();
            positions.iter().map(|position| Settled::of(state.assignment.id_of(position).is_some())).collect()
        };
        let held: Vec<Settled> = are_held();
        if held.contains(&Settled::Applied) {
            self.member.call("confirm the membership of a Kafka group", Command::Renew).await?;
            return Ok(are_held());
        }
        Ok(held)
    }

    async fn close(&self) -> Result<(), StoreError> {
        if lock(&self.member.shared.state).is_closed {
            return Ok(());
        }
        self.member.call("leave a Kafka group", Command::Close).await
    }

    fn lease(&self) -> Duration {
        self.member.shared.lease
    }

    fn wakeup(&self) -> &Wakeup {
        &self.member.shared.wakeup
    }

    fn revocations(&self) -> &Wakeup {
        &self.member.shared.revocations
    }
}

#[cfg(test)]
mod tests {
    use posthaste_core::Progress;
    use posthaste_core::bus::AssignedPartition;

    use super::*;

    const LEASE: Duration = Duration::from_secs(10);

    fn record(partition_id: i64, offset: i64) -> Buffered {
        Buffered {
            partition_id,
            generation: 1,
            offset,
            appended_at: 0,
            key: String::new(),
            value: bytes::Bytes::from_static(b"value"),
            headers: Vec::new(),
            damage: None,
        }
    }

    /// A consumer that has read two records of each of two partitions.
    fn shared() -> Shared {
        let shared = Shared {
            group: "group".to_owned(),
            lease: LEASE,
            state: Mutex::new(State::new("group")),
            wakeup: Wakeup::default(),
            revocations: Wakeup::default(),
        };
        let mut state = lock(&shared.state);
        for id in 0..2 {
            let partition = AssignedPartition::new("topic".to_owned(), id as u32, 1, Progress::at(0));
            state.assignment.insert(id, partition, tokio::time::Instant::now());
            for offset in 0..2 {
                let record = record(id, offset);
                state.buffered_bytes += record.size();
                state.buffer.push_back(record);
            }
        }
        drop(state);
        shared
    }

    #[tokio::test]
    async fn a_partition_whose_commits_are_refused_stops_no_other() {
        let shared = shared();
        let fetched = shared.hand_out(3).unwrap();
        let [first, second, of_other] = &fetched[..] else { panic!("{fetched:?}") };
        assert_eq!(shared.accept(&[&first.position]).unwrap(), [Settled::Applied]);
        let long_ago = Instant::now().checked_sub(2 * LEASE).unwrap();
        lock(&shared.state).uncommitted.postpone(long_ago);
        let both = [&second.position, &of_other.position];
        assert!(shared.accept(&both).is_err(), "the cluster may be out of reach");
        lock(&shared.state).refused.insert(0);
        assert_eq!(shared.accept(&both).unwrap(), [Settled::Locked, Settled::Applied]);
        lock(&shared.state).refused.clear();
        lock(&shared.state).uncommitted.committed(&BTreeSet::from([0]), Instant::now());
        assert_eq!(shared.accept(&[&second.position]).unwrap(), [Settled::Applied]);
    }

    #[tokio::test]
    async fn nothing_is_handed_out_of_a_partition_whose_commits_are_refused() {
        let shared = shared();
        lock(&shared.state).refused.insert(0);
        let fetched = shared.hand_out(10).unwrap();
        assert!(fetched.len() == 2 && fetched.iter().all(|record| record.position.partition == 1), "{fetched:?}");
        lock(&shared.state).refused.clear();
        let fetched = shared.hand_out(10).unwrap();
        assert_eq!(fetched.iter().map(|record| record.position.offset).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(lock(&shared.state).buffered_bytes, 0);
    }
}
