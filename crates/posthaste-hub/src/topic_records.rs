//! The records of a topic, for operators who look into it.

use std::collections::BTreeMap;

use posthaste_api::{Base64, ReadFrom, TopicCursor, TopicRecord, TopicRecords};
use posthaste_core::StoreError;
use posthaste_core::bus::Fetched;

use crate::Hub;
use crate::envelope::{self, ReadableValue};

impl Hub {
    /// The next records of a topic, without joining a group; `None` if there is no such topic.
    pub async fn topic_records(
        &self,
        topic: &str,
        from: &ReadFrom,
        limit: usize,
    ) -> Result<Option<TopicRecords>, StoreError> {
        let mut partitions = self.stores.inspector.topics().await?;
        partitions.retain(|state| state.topic == topic);
        if partitions.is_empty() {
            return Ok(None);
        }
        let (mut next, mut unread) = (BTreeMap::new(), BTreeMap::new());
        for state in partitions {
            let offset = match from {
                ReadFrom::Earliest => state.first_offset,
                ReadFrom::Latest => state.next_offset,
                ReadFrom::Cursor(TopicCursor(offsets)) => {
                    let offset = offsets.get(&state.partition).copied().unwrap_or(state.first_offset);
                    // Retention may have removed the record, or the topic was created again.
                    offset.clamp(state.first_offset, state.next_offset.max(state.first_offset))
                }
            };
            next.insert(state.partition, offset);
            if offset < state.next_offset {
                unread.insert(state.partition, offset);
            }
        }
        let records = match unread.is_empty() {
            true => Vec::new(),
            false => self.stores.inspector.read(topic, &unread, limit).await?,
        };
        for Fetched { position, .. } in &records {
            next.insert(position.partition, position.offset + 1);
        }
        let items = records.into_iter().map(|record| self.shown_record(record)).collect();
        Ok(Some(TopicRecords { items, cursor: TopicCursor(next).to_string() }))
    }

    fn shown_record(&self, record: Fetched) -> TopicRecord {
        let ReadableValue { schema_id, value } = envelope::readable_value(&self.topics, &record);
        let may_be_sealed = self.topics.has_deliveries(&record.position.topic);
        let (value, value_base64, error) = match value {
            Ok(value) => (Some(value), None, None),
            Err(error) if may_be_sealed => {
                let error = format!("{error}; its bytes are not shown, because they may contain sealed credentials");
                (None, None, Some(error))
            }
            Err(error) => (None, Some(Base64(record.value.clone())), Some(error)),
        };
        let Fetched { position, key, .. } = record;
        TopicRecord {
            topic: position.topic.to_string(),
            partition: position.partition,
            offset: position.offset,
            key,
            schema_id,
            value,
            value_base64,
            error,
        }
    }
}
