//! What operators see of the topics and groups, and the reset of positions.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use posthaste_core::bus::{Fetched, Position};
use posthaste_core::hub_store::{Backlog, BusInspector, LogEntry, READ_BYTES, READ_RECORDS, ResetTo, TopicState};
use posthaste_core::{Progress, StoreError, lock};
use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::KafkaResult;
use rdkafka::message::Message;
use rdkafka::topic_partition_list::Offset;

use crate::KafkaBus;
use crate::commit;
use crate::consumer::{Buffered, LocalMember};
use crate::context::LoggingContext;
use crate::errors::failed;
use crate::options::KafkaOptions;
use crate::poller::{RESETTING, record};
use crate::positions::{Bounds, TIMEOUT, TopicPartition, bounds, committed};

/// The longest list of backlogs.
const MAX_BACKLOGS: usize = 1_000;
/// How long a read waits for records that exist.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
const READING: &str = "read a topic";

type Client = Arc<BaseConsumer<LoggingContext>>;

/// The groups that this process reads for, with a client for questions about each.
#[derive(Default)]
pub(crate) struct Groups {
    members: Mutex<Vec<Weak<LocalMember>>>,
    clients: Mutex<BTreeMap<String, Client>>,
}

impl Groups {
    pub(crate) fn add(&self, options: &KafkaOptions, member: &Arc<LocalMember>) -> KafkaResult<()> {
        let group = &member.shared.group;
        let mut clients = lock(&self.clients);
        if !clients.contains_key(group) {
            clients.insert(group.clone(), client(options, group)?);
        }
        let mut members = lock(&self.members);
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(member));
        Ok(())
    }

    fn members(&self) -> Vec<Arc<LocalMember>> {
        lock(&self.members).iter().filter_map(Weak::upgrade).collect()
    }
}

/// A client that asks about a group and is not a member of it.
fn client(options: &KafkaOptions, group: &str) -> KafkaResult<Client> {
    Ok(Arc::new(options.consumer_config(group).create_with_context(LoggingContext::default())?))
}

/// A partition, and the progress of each group in it.
struct PartitionState {
    partition: TopicPartition,
    bounds: Bounds,
    groups: Vec<(String, Progress)>,
}

impl KafkaBus {
    /// Asks the cluster about every partition of our topics.
    async fn partitions(&self) -> Result<Vec<PartitionState>, StoreError> {
        let clients = lock(&self.0.groups.clients).clone();
        let Some(first) = clients.values().next().cloned() else { return Ok(Vec::new()) };
        let options = self.0.options.clone();
        blocking("ask Kafka about topics", move || {
            let partitions = our_partitions(&first, &options)?;
            let mut states: BTreeMap<TopicPartition, PartitionState> = bounds(&first, &partitions)?
                .into_iter()
                .map(|(partition, bounds)| {
                    (partition.clone(), PartitionState { partition, bounds, groups: Vec::new() })
                })
                .collect();
            for (group, client) in clients {
                for (partition, progress) in committed(&client, &partitions)? {
                    if let (Some(state), Some(progress)) = (states.get_mut(&partition), progress) {
                        state.groups.push((group.clone(), progress));
                    }
                }
            }
            Ok(states.into_values().collect())
        })
        .await
    }
}

#[async_trait]
impl BusInspector for KafkaBus {
    /// Nothing: Kafka has no index of keys.
    async fn records_of(&self, _: &str) -> Result<Vec<LogEntry>, StoreError> {
        Ok(Vec::new())
    }

    fn has_key_index(&self) -> bool {
        false
    }

    async fn topics(&self) -> Result<Vec<TopicState>, StoreError> {
        let partitions = self.partitions().await?.into_iter();
        let state = |state: PartitionState| TopicState {
            topic: state.partition.0,
            partition: state.partition.1 as u32,
            first_offset: state.bounds.first,
            next_offset: state.bounds.next,
            groups: state.groups.into_iter().map(|(group, progress)| (group, progress.watermark())).collect(),
        };
        Ok(partitions.map(state).collect())
    }

    async fn backlogs(&self) -> Result<Vec<Backlog>, StoreError> {
        let mut backlogs = Vec::new();
        for PartitionState { partition: (topic, partition), bounds, groups } in self.partitions().await? {
            for (group, progress) in groups {
                if progress.watermark() == bounds.next {
                    continue;
                }
                backlogs.push(Backlog {
                    group,
                    topic: topic.clone(),
                    partition: partition as u32,
                    progress: format!("{} {}", progress.watermark(), progress.encode()),
                    is_position_lost: !bounds.contains(progress.watermark()),
                });
            }
        }
        // A lost position needs an operator, so none is left out for other backlogs.
        backlogs.sort_by_key(|backlog| !backlog.is_position_lost);
        backlogs.truncate(MAX_BACKLOGS);
        Ok(backlogs)
    }

    /// The lag of the records that this process reads. Each process knows its own.
    async fn lag_of_groups(&self) -> Result<Vec<(String, Duration)>, StoreError> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mut lags: HashMap<String, Duration> = HashMap::new();
        for member in self.0.groups.members() {
            let oldest = lock(&member.shared.state).appended_at.values().min().copied();
            if let Some(oldest) = oldest {
                let age = now.saturating_sub(Duration::from_millis(u64::try_from(oldest).unwrap_or_default()));
                let lag = lags.entry(member.shared.group.clone()).or_default();
                *lag = age.max(*lag);
            }
        }
        Ok(lags.into_iter().collect())
    }

    async fn read(&self, topic: &str, from: &BTreeMap<u32, i64>, limit: usize) -> Result<Vec<Fetched>, StoreError> {
        let (options, topic, from) = (self.0.options.clone(), topic.to_owned(), from.clone());
        let limit = limit.min(READ_RECORDS);
        blocking(READING, move || read(&options, &topic, &from, limit)).await
    }

    /// Nothing: Kafka removes records itself.
    async fn remove_expired(&self, _: Duration) -> Result<u64, StoreError> {
        Ok(0)
    }

    async fn reset(&self, group: &str, topic: &str, partition: Option<u32>, to: ResetTo) -> Result<u64, StoreError> {
        let is_chosen = |state: &PartitionState| {
            let (name, number) = &state.partition;
            let is_read = state.groups.iter().any(|(reading, _)| reading == group);
            is_read && name == topic && partition.is_none_or(|chosen| i64::from(chosen) == i64::from(*number))
        };
        let chosen: Vec<PartitionState> = self.partitions().await?.into_iter().filter(is_chosen).collect();
        let member = self.0.groups.members().into_iter().find(|member| member.shared.group == group);
        for PartitionState { partition, bounds, .. } in &chosen {
            match &member {
                Some(member) => member.reset(partition.clone(), to).await?,
                None => {
                    let client = lock(&self.0.groups.clients).get(group).cloned();
                    let (partition, offset) = (partition.clone(), bounds.at(to));
                    let Some(client) = client else { return Ok(0) };
                    blocking(RESETTING, move || client.commit(&commit::at(&partition, offset)?, CommitMode::Sync))
                        .await?;
                }
            }
        }
        Ok(chosen.len() as u64)
    }
}

/// The partitions of our topics.
fn our_partitions(client: &BaseConsumer<LoggingContext>, options: &KafkaOptions) -> KafkaResult<Vec<TopicPartition>> {
    let metadata = client.fetch_metadata(None, TIMEOUT)?;
    let ours = metadata.topics().iter().filter(|topic| options.is_ours(topic.name()));
    let partitions = ours.flat_map(|topic| {
        let has_leader = topic.partitions().iter().filter(|partition| partition.leader() >= 0);
        has_leader.map(|partition| (topic.name().to_owned(), partition.id()))
    });
    Ok(partitions.collect())
}

fn read(options: &KafkaOptions, topic: &str, from: &BTreeMap<u32, i64>, limit: usize) -> KafkaResult<Vec<Fetched>> {
    let client: BaseConsumer<LoggingContext> =
        options.consumer_config("tail").create_with_context(LoggingContext::default())?;
    let metadata = client.fetch_metadata(Some(topic), TIMEOUT)?;
    let existing = metadata.topics().iter().filter(|found| found.name() == topic).flat_map(|found| found.partitions());
    let asked_for = existing.map(|partition| partition.id()).filter(|number| from.contains_key(&(*number as u32)));
    let partitions: Vec<TopicPartition> = asked_for.map(|number| (topic.to_owned(), number)).collect();
    let mut list = TopicPartitionList::new();
    // Where each partition ends now, and where the next record to read is.
    let mut unread = HashMap::new();
    for ((topic, partition), bounds) in bounds(&client, &partitions)? {
        let start = from.get(&(partition as u32)).copied().unwrap_or(bounds.first).max(bounds.first);
        if start < bounds.next {
            list.add_partition_offset(&topic, partition, Offset::Offset(start))?;
            unread.insert(partition, bounds.next);
        }
    }
    client.assign(&list)?;
    let (mut records, mut bytes, deadline) = (Vec::new(), 0, Instant::now() + READ_TIMEOUT);
    while !unread.is_empty() && records.len() < limit && bytes < READ_BYTES && Instant::now() < deadline {
        let Some(message) = client.poll(Duration::from_millis(100)) else { continue };
        let message = message?;
        if unread.get(&message.partition()).is_some_and(|next| message.offset() + 1 >= *next) {
            unread.remove(&message.partition());
        }
        let buffered = record(&message);
        bytes += buffered.size();
        let position = Position {
            topic: topic.into(),
            partition: message.partition() as u32,
            offset: message.offset(),
            generation: 0,
        };
        let Buffered { key, value, headers, damage, .. } = buffered;
        records.push(Fetched { position, key, value, headers, damage });
    }
    Ok(records)
}

/// Runs calls of the client library that block.
async fn blocking<T: Send + 'static>(
    doing: &'static str,
    call: impl FnOnce() -> KafkaResult<T> + Send + 'static,
) -> Result<T, StoreError> {
    let done = tokio::task::spawn_blocking(call).await.map_err(|error| failed(doing, error))?;
    done.map_err(|error| failed(doing, error))
}
