//! The commits of what is acked.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use posthaste_core::lock;
use rdkafka::TopicPartitionList;
use rdkafka::consumer::{CommitMode, Consumer};
use rdkafka::error::{KafkaError, KafkaResult};

use super::{COMMITTING, Poller};
use crate::commit;
use crate::errors::{failed, is_of_one_partition, is_rebalance};

/// Acks are durable within 100 ms.
const COMMIT_INTERVAL: Duration = Duration::from_millis(50);
/// How often the partitions whose commits the cluster refuses are tried again.
const REFUSED_INTERVAL: Duration = Duration::from_secs(1);

impl Poller {
    /// Commits what is acked, also while revoked partitions wait for their records in flight.
    pub(super) fn commit_if_due(&mut self) {
        let must_not_commit = self.must_not_commit();
        if (must_not_commit || self.revoking.is_some()) && !self.consumer.assignment_lost() {
            // A rebalance waits for records in flight, and they may wait for this answer.
            self.renewing.drain(..).for_each(|answer| _ = answer.send(Ok(())));
        }
        if must_not_commit {
            return lock(&self.shared.state).uncommitted.postpone(Instant::now());
        }
        let is_called = !self.flushing.is_empty() || !self.renewing.is_empty();
        if !is_called && self.committed_at.elapsed() < COMMIT_INTERVAL {
            return;
        }
        self.committed_at = Instant::now();
        let partitions = self.partitions_due();
        let result = self.commit(&partitions);
        if let Err(error) = &result {
            if error.rdkafka_error_code().is_some_and(is_rebalance) {
                // The group is being rebalanced. The next commit shows if this consumer is still a member.
                lock(&self.shared.state).uncommitted.postpone(Instant::now());
                return;
            }
            if !is_of_one(error) {
                tracing::warn!(group = self.shared.group, %error, "a commit failed; trying again");
            }
        }
        // The caller may have stopped to wait.
        for answer in self.flushing.drain(..) {
            let _ = answer.send(result.clone().map_err(|error| failed(COMMITTING, error)));
        }
        for answer in self.renewing.drain(..) {
            // One partition that the cluster refuses says nothing about the membership.
            let confirmed = result.clone().or_else(|error| if is_of_one(&error) { Ok(()) } else { Err(error) });
            let _ = answer.send(confirmed.map_err(|error| failed(COMMITTING, error)));
        }
    }

    /// Between the end of a revocation and the next assignment, a commit could fail or start another rebalance. The
    /// assignment follows at once; nothing waits for it longer than a lease.
    fn must_not_commit(&self) -> bool {
        let awaits_assignment = self.given_up_at.is_some_and(|at| at.elapsed() < self.shared.lease);
        self.assigning.is_some() || awaits_assignment || (self.revoking.is_some() && self.consumer.assignment_lost())
    }

    /// The partitions to commit now. Those that the cluster refuses are tried less often, and for each flush.
    fn partitions_due(&mut self) -> BTreeSet<i64> {
        let tries_refused = !self.flushing.is_empty() || self.refused_tried_at.elapsed() >= REFUSED_INTERVAL;
        if tries_refused {
            self.refused_tried_at = Instant::now();
        }
        let state = lock(&self.shared.state);
        let mut partitions = state.uncommitted.partitions();
        partitions.retain(|id| tries_refused || !state.refused.contains(id));
        if partitions.is_empty() && !(self.flushing.is_empty() && self.renewing.is_empty()) {
            // A commit of any partition shows that this consumer is still a member.
            partitions.extend(state.assignment.ids().find(|id| !state.refused.contains(id)));
        }
        partitions
    }

    /// Commits the progress of these partitions. If one of them is refused, the others are committed nevertheless: an
    /// error of one partition (`is_of_one`) means that all others are committed.
    pub(super) fn commit(&self, partitions: &BTreeSet<i64>) -> KafkaResult<()> {
        let begun_at = Instant::now();
        match self.commit_together(partitions, begun_at) {
            Err(error) if is_of_one(&error) && partitions.len() > 1 => {
                let each = partitions.iter().map(|id| self.commit_together(&BTreeSet::from([*id]), begun_at));
                // All are tried before an error is returned.
                let errors: Vec<KafkaError> = each.filter_map(Result::err).collect();
                errors.into_iter().min_by_key(is_of_one).map_or(Ok(()), Err)
            }
            other => other,
        }
    }

    fn commit_together(&self, partitions: &BTreeSet<i64>, begun_at: Instant) -> KafkaResult<()> {
        let list = self.progress_of(partitions);
        // A commit without an answer would not tell if it is durable.
        let committed = if list.count() > 0 { self.consumer.commit(&list, CommitMode::Sync) } else { Ok(()) };
        let mut state = lock(&self.shared.state);
        match &committed {
            Ok(()) => {
                state.uncommitted.committed(partitions, begun_at);
                for id in partitions.iter().filter(|id| state.refused.remove(id)) {
                    let ((topic, partition), group) = (&self.names[*id as usize], &self.shared.group);
                    tracing::info!(group, topic, partition, "the cluster accepts the commits of a partition again");
                }
            }
            Err(error) if is_of_one(error) && partitions.len() == 1 => {
                for id in partitions.iter().filter(|id| state.refused.insert(**id)) {
                    let ((topic, partition), group) = (&self.names[*id as usize], &self.shared.group);
                    tracing::warn!(group, topic, partition, %error, "the cluster refuses the commits of a partition");
                }
            }
            Err(_) => {}
        }
        committed
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

    /// What is acked is committed before another consumer reads the partitions. Returns false if that has to be tried
    /// again.
    pub(super) fn commit_before_revocation(&self, ids: &BTreeSet<i64>, until: tokio::time::Instant) -> bool {
        let uncommitted = lock(&self.shared.state).uncommitted.among(ids);
        let Err(error) = self.commit(&uncommitted) else { return true };
        // A partition that the cluster refuses, for example because its topic was deleted, is not worth a wait.
        let is_over = is_of_one(&error) || self.consumer.assignment_lost() || tokio::time::Instant::now() >= until;
        let group = &self.shared.group;
        match is_over {
            true => tracing::warn!(group, %error, "a commit failed before a rebalance: deliveries repeat"),
            false => tracing::debug!(group, %error, "a commit failed before a rebalance; trying again"),
        }
        is_over
    }

    /// Commits what is acked. While the group is being rebalanced, a commit is refused: then it waits for the end of the
    /// rebalance, but not longer than a lease.
    pub(super) fn commit_before_close(&mut self) -> KafkaResult<()> {
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
}

fn is_of_one(error: &KafkaError) -> bool {
    error.rdkafka_error_code().is_some_and(is_of_one_partition)
}
