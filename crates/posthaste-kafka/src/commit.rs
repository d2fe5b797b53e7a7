//! What a commit says: the watermark of each partition, and the completed set as the text of its metadata.

use posthaste_core::Progress;
use rdkafka::TopicPartitionList;
use rdkafka::error::KafkaResult;
use rdkafka::topic_partition_list::Offset;

use crate::positions::TopicPartition;

/// The longest metadata that a broker accepts by default (`offset.metadata.max.bytes`).
const MAX_METADATA: usize = 4_096;
/// The text begins with the version of its format.
const VERSION: &str = "1 ";
/// The longest text of a completed set.
pub const MAX_COMPLETED_TEXT: usize = MAX_METADATA - VERSION.len();

fn metadata(progress: &Progress) -> String {
    format!("{VERSION}{}", progress.encode())
}

/// A commit that moves one partition to this offset.
pub(crate) fn at((topic, partition): &TopicPartition, offset: i64) -> KafkaResult<TopicPartitionList> {
    let mut list = TopicPartitionList::new();
    add(&mut list, topic, *partition, &Progress::at(offset))?;
    Ok(list)
}

/// Adds a partition to a commit.
pub(crate) fn add(list: &mut TopicPartitionList, topic: &str, partition: i32, progress: &Progress) -> KafkaResult<()> {
    let mut element = list.add_partition(topic, partition);
    element.set_metadata(metadata(progress));
    element.set_offset(Offset::Offset(progress.watermark()))
}

/// The progress of a committed position; `None` if nothing is committed.
///
/// Metadata of another program says nothing about completed offsets. Then all records from the watermark on are
/// delivered again, which may repeat deliveries, but loses none.
pub(crate) fn progress(offset: Offset, metadata: &str) -> Option<Progress> {
    let Offset::Offset(watermark) = offset else { return None };
    let completed = metadata.strip_prefix(VERSION).unwrap_or_default();
    let progress = Progress::decode(watermark, completed).unwrap_or_else(|error| {
        tracing::warn!(%error, watermark, "the metadata of a commit cannot be read: deliveries after it repeat");
        Progress::at(watermark)
    });
    Some(progress)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_read_back_from_a_commit() {
        let mut before = Progress::at(7);
        (9..20).step_by(2).for_each(|offset| before.complete(offset));
        assert_eq!(progress(Offset::Offset(7), &metadata(&before)), Some(before));
        assert_eq!(progress(Offset::Invalid, ""), None);
    }

    #[test]
    fn metadata_of_another_program_is_ignored() {
        for foreign in ["", "NO_METADATA", "1 junk", "2 1+1"] {
            assert_eq!(progress(Offset::Offset(3), foreign), Some(Progress::at(3)), "{foreign}");
        }
    }
}
