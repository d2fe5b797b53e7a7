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
    /// After this long without a sign of life, the cluster gives the partitions to others.
    pub(crate) session: Duration,
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
    pub(crate) is_closed: bool,
    /// Why the client can do nothing any more, for example because another process uses its `group.instance.id`.
    pub(crate) fatal: Option<String>,
    /// When the consumer was last used.
    pub(crate) used_at: Instant,
}

impl State {
    /// These partitions are not read any more: nothing of them is committed.
    pub(crate) fn forget(&mut self, partitions: &BTreeSet<i64>) {
        self.uncommitted.remove(partitions);
        self.appended_at.retain(|(id, _), _| !partitions.contains(id));
    }

    /// True if the consumer has partitions and was not used for longer than a session, for example because its process
    /// was paused. Others may read its partitions: the polling thread is about to leave the group.
    fn is_expired(&self, session: Duration) -> bool {
        self.used_at.elapsed() >= session && self.assignment.ids().next().is_some()
    }

    /// A caller waits for an answer, so the consumer is used. The polling thread may have been busy for longer than a
    /// lease, because the cluster was slow: that is no reason to leave the group.
    pub(crate) fn is_waited_for(&mut self, session: Duration) {
        if !self.is_expired(session) {
            self.used_at = Instant::now();
        }
    }

    /// True if earlier acks of these partitions do not become durable: the cluster is out of reach. Then more acks are
    /// refused, so that the engine starts no deliveries, which would all be repeated if the session ended. While
    /// partitions are revoked, acks are accepted, because their commit waits for all of them.
    fn refuses_acks(&self, positions: &[&Position], lease: Duration) -> bool {
        let is_revoking = self.assignment.kept() < self.assignment.ids().count();
        let now = Instant::now();
        let mut partitions = positions.iter().filter_map(|position| self.assignment.id_of(position));
        partitions.any(|id| self.uncommitted.is_overdue(id, now, lease)) && !is_revoking
    }

    /// The consumer has left the group.
    pub(crate) fn lose_everything(&mut self) {
        self.assignment.retain(|_| false);
        self.uncommitted = Uncommitted::default();
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
            session: options.session_timeout(),
            state: Mutex::new(State {
                assignment: Assignment::new(group, MAX_COMPLETED_TEXT),
                buffer: VecDeque::new(),
                buffered_bytes: 0,
                appended_at: HashMap::new(),
                uncommitted: Uncommitted::default(),
                is_closed: false,
                fatal: None,
                used_at: Instant::now(),
            }),
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
        if state.is_expired(self.session) {
            return Ok(vec![Settled::LostLease; positions.len()]);
        }
        if state.refuses_acks(positions, self.lease) {
            let why = "earlier acks could not be committed for longer than a lease";
            return Err(StoreError::new("ack to Kafka", FaultKind::Transient, why));
        }
        state.used_at = Instant::now();
        let State { assignment, uncommitted, appended_at, .. } = &mut *state;
        let mut advances = BTreeMap::new();
        let mut settled = Vec::with_capacity(positions.len());
        for position in positions {
            let id = assignment.id_of(position);
            if let Some(id) = id
                && let Some(advance) = assignment.advance(id, position.generation)
            {
                let advance = advances.entry(id).or_insert(advance);
                advance.progress.complete(position.offset);
                appended_at.remove(&(id, position.offset));
            }
            settled.push(Settled::of(id.is_some()));
        }
        assignment.release(positions);
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
        if state.is_expired(self.session) {
            return Ok(Vec::new());
        }
        state.used_at = Instant::now();
        let State { assignment, buffer, buffered_bytes, appended_at, uncommitted, .. } = &mut *state;
        let mut fetched = Vec::new();
        let mut kept = VecDeque::new();
        while fetched.len() < limit
            && let Some(record) = buffer.pop_front()
        {
            if !assignment.contains(record.partition_id, record.generation) {
                *buffered_bytes -= record.size();
                continue;
            }
            if assignment.is_paused(record.partition_id) {
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
            if state.is_expired(self.member.shared.session) {
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
