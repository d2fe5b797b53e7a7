//! The offsets of partitions, and the positions of groups in them, as the cluster knows them.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use posthaste_core::Progress;
use posthaste_core::hub_store::ResetTo;
use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaResult, RDKafkaErrorCode};
use rdkafka::metadata::MetadataTopic;
use rdkafka::topic_partition_list::Offset;

use crate::commit;

/// How long a question to the cluster may take.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) type TopicPartition = (String, i32);

/// The offsets of a partition: the first that exists, and the next one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) first: i64,
    pub(crate) next: i64,
}

impl Bounds {
    /// True if the position exists. A position in a topic that was created again may exist by chance, because the new topic
    /// is longer: then the new records below it are not read. The client library does not tell the id of a topic, so this
    /// cannot be noticed; docs/kafka.md says what operators do.
    pub(crate) fn contains(&self, position: i64) -> bool {
        (self.first..=self.next).contains(&position)
    }

    pub(crate) fn at(&self, to: ResetTo) -> i64 {
        match to {
            ResetTo::Earliest => self.first,
            ResetTo::Latest => self.next,
        }
    }
}

pub(crate) fn list(partitions: &[TopicPartition]) -> TopicPartitionList {
    let mut list = TopicPartitionList::with_capacity(partitions.len());
    partitions.iter().for_each(|(topic, partition)| _ = list.add_partition(topic, *partition));
    list
}

/// The partitions that cannot be read now, and why: for example because they have no leader.
pub(crate) fn unreadable<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: &[TopicPartition],
) -> KafkaResult<BTreeMap<TopicPartition, String>> {
    if partitions.is_empty() {
        return Ok(BTreeMap::new());
    }
    let metadata = consumer.fetch_metadata(None, TIMEOUT)?;
    let topics: HashMap<&str, &MetadataTopic> = metadata.topics().iter().map(|topic| (topic.name(), topic)).collect();
    let mut unreadable = BTreeMap::new();
    for (topic, number) in partitions {
        let described = topics.get(topic.as_str()).map(|topic| topic.partitions()).unwrap_or_default();
        let partition = described.iter().find(|partition| partition.id() == *number);
        let why = match partition.map(|partition| (partition.leader(), partition.error())) {
            Some((0.., _)) => continue,
            Some((_, Some(error))) => RDKafkaErrorCode::from(error).to_string(),
            Some((_, None)) => "it has no leader".to_owned(),
            None => "the cluster does not know it".to_owned(),
        };
        unreadable.insert((topic.clone(), *number), why);
    }
    Ok(unreadable)
}

/// The offsets of each partition.
pub(crate) fn bounds<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: &[TopicPartition],
) -> KafkaResult<BTreeMap<TopicPartition, Bounds>> {
    if partitions.is_empty() {
        return Ok(BTreeMap::new());
    }
    let mut list = list(partitions);
    let firsts = offsets(consumer, &mut list, Offset::Beginning)?;
    let nexts = offsets(consumer, &mut list, Offset::End)?;
    let bounds = |(partition, first)| {
        let next = nexts.get(&partition).copied().unwrap_or(first);
        (partition, Bounds { first, next })
    };
    Ok(firsts.into_iter().map(bounds).collect())
}

/// The first or the next offset of each partition.
fn offsets<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    list: &mut TopicPartitionList,
    at: Offset,
) -> KafkaResult<BTreeMap<TopicPartition, i64>> {
    list.set_all_offsets(at)?;
    let mut offsets = BTreeMap::new();
    for element in consumer.offsets_for_times(list.clone(), TIMEOUT)?.elements() {
        element.error()?;
        let (first, next) = match element.offset() {
            Offset::Offset(offset) => (offset, offset),
            // The client answers with the end if the partition is empty.
            _ => consumer.fetch_watermarks(element.topic(), element.partition(), TIMEOUT)?,
        };
        let offset = if at == Offset::Beginning { first } else { next };
        offsets.insert((element.topic().to_owned(), element.partition()), offset);
    }
    Ok(offsets)
}

/// What the group of the consumer has committed for each partition; `None` if nothing.
pub(crate) fn committed<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: &[TopicPartition],
) -> KafkaResult<Vec<(TopicPartition, Option<Progress>)>> {
    if partitions.is_empty() {
        return Ok(Vec::new());
    }
    let committed = consumer.committed_offsets(list(partitions), TIMEOUT)?;
    let mut found = Vec::with_capacity(partitions.len());
    for element in committed.elements() {
        element.error()?;
        let progress = commit::progress(element.offset(), element.metadata());
        found.push(((element.topic().to_owned(), element.partition()), progress));
    }
    Ok(found)
}
