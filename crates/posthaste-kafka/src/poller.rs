//! The thread that polls the client of one consumer.
//!
//! All calls of the client come from this thread: it reads records into the buffer, answers rebalances, and commits.

mod assign;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use posthaste_core::bus::Topics;
use posthaste_core::{StoreError, lock};
use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Headers, Message};

use crate::commit;
use crate::consumer::{Answer, Buffered, Command, Reset, Shared};
use crate::context::{Event, EventContext};
use crate::errors::{failed, is_of_one_partition, is_rebalance};
use crate::options::KafkaOptions;
use crate::positions::{TopicPartition, list};

use assign::Revoking;

pub(crate) use assign::RESETTING;

/// The longest time that a poll waits for a record, and so the delay of a command.
const POLL: Duration = Duration::from_millis(20);
/// How many records are read before commands and commits have their turn.
const READ_AT_ONCE: usize = 500;
/// Acks are durable within 100 ms.
const COMMIT_INTERVAL: Duration = Duration::from_millis(50);
/// While this much waits in the buffer, no more is read.
const MAX_BUFFERED: usize = 20_000;
const MAX_BUFFERED_BYTES: usize = 32 * 1024 * 1024;
const COMMITTING: &str = "commit to Kafka";

/// Starts the thread of a consumer.
pub(crate) fn start(
    options: &KafkaOptions,
    topics: &Topics,
    shared: Arc<Shared>,
    commands: mpsc::Receiver<Command>,
) -> Result<(), StoreError> {
    const DOING: &str = "join a Kafka group";
    let consumer: BaseConsumer<EventContext> = options
        .consumer_config(&shared.group)
        .create_with_context(EventContext::default())
        .map_err(|error| failed(DOING, error))?;
    let pattern = topics.prefix().map(|prefix| format!("^{}.*", prefix.replace('.', "\\.")));
    let names: Vec<&str> = topics.names().iter().map(String::as_str).chain(pattern.as_deref()).collect();
    consumer.subscribe(&names).map_err(|error| failed(DOING, error))?;
    let topics = names.into_iter().map(str::to_owned).collect();
    let poller = Poller {
        consumer,
        commands,
        topics,
        has_left: false,
        ids: HashMap::new(),
        names: Vec::new(),
        generation: generation(),
        assigning: None,
        revoking: None,
        committed_at: Instant::now(),
        flushing: Vec::new(),
        renewing: Vec::new(),
        paused: BTreeSet::new(),
        unread: BTreeSet::new(),
        resets: Vec::new(),
        may_have_lost_positions: false,
        positions_checked_at: Instant::now(),
        is_away: false,
        shared,
    };
    let name = format!("kafka-{}", poller.shared.group);
    std::thread::Builder::new().name(name).spawn(move || poller.run()).map_err(|error| failed(DOING, error))?;
    Ok(())
}

struct Poller {
    consumer: BaseConsumer<EventContext>,
    shared: Arc<Shared>,
    commands: mpsc::Receiver<Command>,
    topics: Vec<String>,
    /// The consumer was not used for longer than a lease, and has left the group.
    has_left: bool,
    /// The ids that the assignment uses for partitions, and back.
    ids: HashMap<TopicPartition, i64>,
    names: Vec<TopicPartition>,
    /// Rises with every assigned partition.
    generation: i64,
    /// Partitions that the cluster has assigned, and whose positions are not known yet.
    assigning: Option<Vec<TopicPartition>>,
    /// Partitions that the cluster has revoked, and that are given up when nothing of them is in flight.
    revoking: Option<Revoking>,
    committed_at: Instant,
    /// Calls that wait for a commit of everything that was acked before them.
    flushing: Vec<Answer>,
    /// Calls that wait for a commit, which shows that this consumer is still a member.
    renewing: Vec<Answer>,
    /// Partitions of which the client reads nothing now.
    paused: BTreeSet<i64>,
    /// Partitions that are assigned, and that the client does not know: their position is lost, or the cluster does not
    /// tell it now. The latter are not in the assignment of the shared state.
    unread: BTreeSet<i64>,
    /// Positions that operators want to be reset.
    resets: Vec<Reset>,
    /// The cluster refused to read from a position. It does not say in which partition.
    may_have_lost_positions: bool,
    positions_checked_at: Instant,
    /// The cluster is out of reach.
    is_away: bool,
}

impl Poller {
    fn run(mut self) {
        loop {
            self.poll();
            self.finish_assignment();
            self.finish_revocation();
            self.handle_events();
            match self.handle_commands() {
                Some(Closing::Answer(answer)) => return self.close(Some(answer)),
                Some(Closing::Dropped) => return self.close(None),
                None => {}
            }
            self.leave_if_unused();
            self.reset_positions();
            self.check_positions();
            self.commit_if_due();
            self.pause_and_resume();
        }
    }

    /// Reads the records that are there.
    fn poll(&mut self) {
        let mut read = Vec::new();
        for _ in 0..READ_AT_ONCE {
            let wait = if read.is_empty() { POLL } else { Duration::ZERO };
            match self.consumer.poll(wait) {
                None => break,
                Some(Ok(message)) => read.extend(
                    self.ids.get(&(message.topic().to_owned(), message.partition())).map(|id| (*id, record(&message))),
                ),
                Some(Err(error)) => {
                    self.report_fatal();
                    self.may_have_lost_positions |=
                        error.rdkafka_error_code() == Some(RDKafkaErrorCode::AutoOffsetReset);
                    self.is_away = reported(&self.shared.group, &error, self.is_away);
                    break;
                }
            }
        }
        if read.is_empty() {
            return;
        }
        self.is_away = false;
        let mut state = lock(&self.shared.state);
        for (partition_id, mut record) in read {
            // A record that was on its way when its partition was revoked belongs to nobody.
            let Some(generation) = state.assignment.generation_of(partition_id) else { continue };
            (record.partition_id, record.generation) = (partition_id, generation);
            state.buffered_bytes += record.size();
            state.appended_at.insert((partition_id, record.offset), record.appended_at);
            state.buffer.push_back(record);
        }
        drop(state);
        self.shared.wakeup.wake();
    }

    /// After a fatal error the client does nothing any more. The next fetch fails, so that operators see it.
    fn report_fatal(&self) {
        if let Some((code, reason)) = self.consumer.client().fatal_error() {
            let fatal = &mut lock(&self.shared.state).fatal;
            if fatal.is_none() {
                tracing::error!(group = self.shared.group, %code, reason, "the Kafka consumer stops for good");
                *fatal = Some(format!("the Kafka consumer has stopped for good: {reason} ({code})"));
                self.shared.wakeup.wake();
            }
        }
    }

    fn is_rebalancing(&self) -> bool {
        self.assigning.is_some() || self.revoking.is_some()
    }

    fn handle_events(&mut self) {
        // The next rebalance is handled when the previous one is finished.
        while !self.is_rebalancing() {
            match self.consumer.context().next() {
                None => return,
                Some(Event::Assigned(partitions)) => self.assigning = Some(partitions),
                Some(Event::Revoked(partitions)) => self.begin_revocation(partitions),
            }
            self.finish_assignment();
            self.finish_revocation();
        }
    }

    /// The client tells the cluster that this consumer lives, even if nobody uses it any more. After a lease without use
    /// it leaves the group, so that others read its partitions. It joins again when it is used.
    fn leave_if_unused(&mut self) {
        let is_used = lock(&self.shared.state).used_at.elapsed() < self.shared.lease;
        match (is_used, self.has_left) {
            (false, false) => {
                let (group, lease) = (&self.shared.group, self.shared.lease);
                tracing::warn!(
                    group,
                    ?lease,
                    "the consumer was not used for longer than its lease: it leaves the group"
                );
                let uncommitted = lock(&self.shared.state).uncommitted.partitions();
                if let Err(error) = self.commit(&uncommitted) {
                    tracing::warn!(group, %error, "a commit failed before a consumer left: deliveries repeat");
                }
                lock(&self.shared.state).lose_everything();
                self.shared.revocations.wake();
                self.refuse_assignment();
                self.consumer.unsubscribe();
                self.has_left = true;
            }
            (true, true) => {
                let topics: Vec<&str> = self.topics.iter().map(String::as_str).collect();
                match self.consumer.subscribe(&topics) {
                    Ok(()) => self.has_left = false,
                    Err(error) => tracing::warn!(group = self.shared.group, %error, "failed to join a group again"),
                }
            }
            _ => {}
        }
    }

    /// Returns why the consumer is to be closed, if it is.
    fn handle_commands(&mut self) -> Option<Closing> {
        loop {
            match self.commands.try_recv() {
                Ok(Command::Flush(answer)) => {
                    self.note_use(&answer);
                    self.flushing.push(answer);
                }
                Ok(Command::Renew(answer)) => {
                    self.note_use(&answer);
                    self.renewing.push(answer);
                }
                Ok(Command::Reset(reset)) => self.resets.push(reset),
                Ok(Command::Close(answer)) => return Some(Closing::Answer(answer)),
                Err(mpsc::TryRecvError::Empty) => return None,
                Err(mpsc::TryRecvError::Disconnected) => return Some(Closing::Dropped),
            }
        }
    }

    /// A caller that has stopped to wait is no use.
    fn note_use(&self, answer: &Answer) {
        if !answer.is_closed() {
            lock(&self.shared.state).is_waited_for(self.shared.session);
        }
    }

    /// Commits what is acked. Between the revocation of partitions and the next assignment, a commit could fail or start
    /// another rebalance.
    fn commit_if_due(&mut self) {
        let is_called = !self.flushing.is_empty() || !self.renewing.is_empty();
        let is_due = is_called || self.committed_at.elapsed() >= COMMIT_INTERVAL;
        if self.is_rebalancing() {
            lock(&self.shared.state).uncommitted.postpone(Instant::now());
            // A rebalance waits for records in flight, and they may wait for this answer.
            if !self.consumer.assignment_lost() {
                std::mem::take(&mut self.renewing).into_iter().for_each(|answer| self.answer(answer, Ok(())));
            }
        }
        if self.is_rebalancing() || !is_due {
            return;
        }
        self.committed_at = Instant::now();
        let partitions = {
            let state = lock(&self.shared.state);
            let mut partitions = state.uncommitted.partitions();
            if partitions.is_empty() && is_called {
                // A commit of any partition shows that this consumer is still a member.
                partitions.extend(state.assignment.ids().next());
            }
            partitions
        };
        let result = self.commit(&partitions);
        if let Err(error) = &result {
            if error.rdkafka_error_code().is_some_and(is_rebalance) {
                // The group is being rebalanced. The next commit shows if this consumer is still a member.
                lock(&self.shared.state).uncommitted.postpone(Instant::now());
                return;
            }
            tracing::warn!(group = self.shared.group, %error, "a commit failed; trying again");
        }
        let answers = std::mem::take(&mut self.flushing).into_iter().chain(std::mem::take(&mut self.renewing));
        for answer in answers {
            self.answer(answer, result.clone().map_err(|error| failed(COMMITTING, error)));
        }
    }

    /// Answers a caller. One that has waited until now, however long the cluster took, uses the consumer.
    fn answer(&self, answer: Answer, result: Result<(), StoreError>) {
        self.note_use(&answer);
        // The caller may have stopped to wait.
        let _ = answer.send(result);
    }

    /// Commits the progress of these partitions. If one of them is refused, the others are committed nevertheless.
    fn commit(&self, partitions: &BTreeSet<i64>) -> KafkaResult<()> {
        let begun_at = Instant::now();
        let committed = self.commit_together(partitions, begun_at);
        let is_of_one = |error: &KafkaError| error.rdkafka_error_code().is_some_and(is_of_one_partition);
        match committed {
            Err(error) if is_of_one(&error) && partitions.len() > 1 => {
                let each = partitions.iter().map(|id| self.commit_together(&BTreeSet::from([*id]), begun_at));
                // All are committed, before the first error is returned.
                each.collect::<Vec<_>>().into_iter().collect()
            }
            other => other,
        }
    }

    fn commit_together(&self, partitions: &BTreeSet<i64>, begun_at: Instant) -> KafkaResult<()> {
        let list = self.progress_of(partitions);
        if list.count() > 0 {
            // A commit without an answer would not tell if it is durable.
            self.consumer.commit(&list, CommitMode::Sync)?;
        }
        lock(&self.shared.state).uncommitted.committed(partitions, begun_at);
        Ok(())
    }

    /// The position of each partition, as a commit says it.
    fn progress_of(&self, partitions: &BTreeSet<i64>) -> TopicPartitionList {
        let state = lock(&self.shared.state);
        let mut list = TopicPartitionList::new();
        for id in partitions {
            let (Some(progress), Some((topic, partition))) =
                (state.assignment.progress_of(*id), self.names.get(*id as usize))
            else {
                continue;
            };
            if let Err(error) = commit::add(&mut list, topic, *partition, progress) {
                tracing::error!(%error, "a position cannot be committed");
            }
        }
        list
    }

    /// Stops to read while the buffer is full, and partitions whose completed set is too long.
    fn pause_and_resume(&mut self) {
        let to_pause: BTreeSet<i64> = {
            let state = lock(&self.shared.state);
            let is_full = state.buffer.len() >= MAX_BUFFERED || state.buffered_bytes >= MAX_BUFFERED_BYTES;
            let was_full = !self.paused.is_empty()
                && (state.buffer.len() >= MAX_BUFFERED / 2 || state.buffered_bytes >= MAX_BUFFERED_BYTES / 2);
            let is_known = |id: &i64| !self.unread.contains(id);
            match is_full || was_full {
                true => state.assignment.ids().filter(is_known).collect(),
                false => state.assignment.unreadable().filter(is_known).collect(),
            }
        };
        let owned = |id: &&i64| lock(&self.shared.state).assignment.has(**id);
        let pause: Vec<_> = to_pause.difference(&self.paused).map(|id| self.names[*id as usize].clone()).collect();
        let resume: Vec<_> =
            self.paused.difference(&to_pause).filter(owned).map(|id| self.names[*id as usize].clone()).collect();
        let changed = if pause.is_empty() { Ok(()) } else { self.consumer.pause(&list(&pause)) };
        let changed = changed.and_then(|()| match resume.is_empty() {
            true => Ok(()),
            false => self.consumer.resume(&list(&resume)),
        });
        match changed {
            Ok(()) => self.paused = to_pause,
            Err(error) => tracing::warn!(group = self.shared.group, %error, "failed to pause or resume partitions"),
        }
    }

    fn close(mut self, answer: Option<Answer>) {
        lock(&self.shared.state).is_closed = true;
        let committed = self.commit_before_close();
        lock(&self.shared.state).lose_everything();
        self.shared.revocations.wake();
        self.consumer.context().close();
        // A rebalance that was not answered would keep the consumer from closing.
        if let Some(Revoking { partitions, .. }) = self.revoking.take() {
            let ids = self.ids_of(&partitions).into_iter().collect();
            self.give_up(&ids);
        }
        self.refuse_assignment();
        drop(self.consumer);
        if let Some(answer) = answer {
            let _ = answer.send(committed.map_err(|error| failed(COMMITTING, error)));
        }
    }

    /// Commits what is acked. While the group is being rebalanced, a commit is refused: then it waits for the end of the
    /// rebalance, but not longer than a lease.
    fn commit_before_close(&mut self) -> KafkaResult<()> {
        let deadline = Instant::now() + self.shared.lease;
        loop {
            let uncommitted = lock(&self.shared.state).uncommitted.partitions();
            match self.commit(&uncommitted) {
                Err(error) if error.rdkafka_error_code().is_some_and(is_rebalance) && Instant::now() < deadline => {
                    self.poll();
                    self.finish_assignment();
                    self.finish_revocation();
                    self.handle_events();
                }
                committed => return committed,
            }
        }
    }

    fn ids_of(&self, partitions: &[TopicPartition]) -> Vec<i64> {
        partitions.iter().filter_map(|partition| self.ids.get(partition).copied()).collect()
    }
}

/// The first generation of a consumer. It is later than those of the consumers that read the partitions before.
fn generation() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_micros()).unwrap_or(i64::MAX / 2)
}

/// Why a consumer is closed.
enum Closing {
    Answer(Answer),
    /// Its handle was dropped.
    Dropped,
}

pub(crate) fn record(message: &BorrowedMessage<'_>) -> Buffered {
    let (mut headers, mut damage) = (Vec::new(), None);
    for header in message.headers().into_iter().flat_map(|headers| headers.iter()) {
        match std::str::from_utf8(header.value.unwrap_or_default()) {
            Ok(value) => headers.push((header.key.to_owned(), value.to_owned())),
            // Headers of other programs may be bytes. Nothing here depends on them.
            Err(_) => headers
                .push((header.key.to_owned(), String::from_utf8_lossy(header.value.unwrap_or_default()).into_owned())),
        }
    }
    let key = match std::str::from_utf8(message.key().unwrap_or_default()) {
        Ok(key) => key.to_owned(),
        Err(error) => {
            damage = Some(format!("the key is not text: {error}"));
            String::from_utf8_lossy(message.key().unwrap_or_default()).into_owned()
        }
    };
    let value = Bytes::copy_from_slice(message.payload().unwrap_or_default());
    let (offset, appended_at) = (message.offset(), message.timestamp().to_millis().unwrap_or_default());
    Buffered { partition_id: 0, generation: 0, offset, appended_at, key, value, headers, damage }
}

/// Reports an error of a poll, once per change. Returns true if the cluster is out of reach.
fn reported(group: &str, error: &KafkaError, was_away: bool) -> bool {
    let code = error.rdkafka_error_code();
    let is_away = matches!(
        code,
        Some(
            RDKafkaErrorCode::AllBrokersDown
                | RDKafkaErrorCode::BrokerTransportFailure
                | RDKafkaErrorCode::OperationTimedOut
                | RDKafkaErrorCode::Resolve
        )
    );
    match is_away {
        true if was_away => {}
        true => tracing::warn!(group, %error, "Kafka is out of reach"),
        false => tracing::warn!(group, %error, "the Kafka consumer reports an error"),
    }
    was_away || is_away
}
