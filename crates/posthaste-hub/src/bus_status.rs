//! What operators see of the bus, and what they change.

use posthaste_api::{GroupPosition, Reset, ResetTo, Topic, TopicList, TopicPartition};
use posthaste_core::StoreError;
use posthaste_core::hub_store::{ResetTo as StoredResetTo, TopicState};

use crate::Hub;

impl Hub {
    /// All topics, with the position of each group.
    pub async fn topics(&self) -> Result<TopicList, StoreError> {
        let mut items: Vec<Topic> = Vec::new();
        for state in self.stores.inspector.topics().await? {
            if items.last().is_none_or(|last| last.topic != state.topic) {
                items.push(Topic { topic: state.topic.clone(), partitions: Vec::new() });
            }
            if let Some(topic) = items.last_mut() {
                topic.partitions.push(partition(&state));
            }
        }
        Ok(TopicList { items })
    }

    /// Moves a group to another position. Returns the number of partitions, 0 if the group does not read the topic.
    pub async fn reset_position(&self, reset: &Reset) -> Result<u64, StoreError> {
        let to = match reset.to {
            ResetTo::Earliest => StoredResetTo::Earliest,
            ResetTo::Latest => StoredResetTo::Latest,
        };
        // On Kafka the id of a group begins with the prefix of our topics.
        let group = self.topics.without_prefix(&reset.group);
        let partitions = self.stores.inspector.reset(group, &reset.topic, reset.partition, to).await?;
        if partitions > 0 {
            let (topic, partition) = (&reset.topic, reset.partition);
            tracing::warn!(topic, group, ?partition, ?to, partitions, "an operator reset the position of a group");
        }
        Ok(partitions)
    }
}

fn partition(state: &TopicState) -> TopicPartition {
    let position = |(group, position): &(String, i64)| GroupPosition {
        group: group.clone(),
        position: *position,
        lag: u64::try_from(state.next_offset - position).unwrap_or_default(),
        position_lost: state.is_lost(*position),
    };
    TopicPartition {
        partition: state.partition,
        first_offset: state.first_offset,
        next_offset: state.next_offset,
        groups: state.groups.iter().map(position).collect(),
    }
}
