use std::collections::HashMap;

use posthaste_api::{DeliveryState, Domain, EventTrace, OutboxState, OutboxStatus, TopicPosition, TracedDelivery};
use posthaste_core::StoreError;
use posthaste_core::hub_store::{DeadLetterRow, DeadLetterStatus, LogEntry};
use posthaste_core::outbox::{self, OutboxRow};
use uuid::Uuid;

use crate::Hub;
use crate::dead_letters;
use crate::envelope;

impl Hub {
    /// The state of an event: its row, its records on the bus, its deliveries, its dead letters. `None` if it is
    /// unknown.
    pub async fn trace(&self, event_id: &str) -> Result<Option<EventTrace>, StoreError> {
        let row = self.stores.outbox.find(event_id).await?;
        let records = self.stores.inspector.records_of(event_id).await?;
        let letters = self.stores.dead_letters.of_event(event_id).await?;
        if row.is_none() && records.is_empty() && letters.is_empty() {
            return Ok(None);
        }
        let outcomes = self.dead_lettered(&records, &letters);
        let deliveries = records.iter().filter_map(|entry| self.delivery(entry, &outcomes)).collect();
        let is_searched = self.stores.inspector.has_key_index();
        Ok(Some(EventTrace {
            event_id: event_id.to_owned(),
            outbox: row.map(outbox_state),
            topics: is_searched.then(|| records.iter().map(position).collect()),
            deliveries: is_searched.then_some(deliveries),
            dead_letters: letters.into_iter().map(dead_letters::shown).collect(),
        }))
    }

    /// The states of the deliveries that were dead-lettered, by delivery id. `Done` if a retry or a replay delivered
    /// it. Dead letters that are on their topic but not in the table yet are included.
    fn dead_lettered(&self, records: &[LogEntry], letters: &[DeadLetterRow]) -> HashMap<String, DeliveryState> {
        let dlts = Domain::ALL.map(|domain| self.topics.dlt(domain));
        let on_topic = records.iter().filter(|entry| dlts.iter().any(|topic| **topic == *entry.topic));
        let on_topic = on_topic.filter_map(|entry| envelope::delivery_in(&entry.value));
        let mut outcomes: HashMap<String, DeliveryState> =
            on_topic.map(|message| (message.delivery_id, DeliveryState::DeadLettered)).collect();
        for letter in letters {
            let outcome = match letter.status {
                DeadLetterStatus::Processed => DeliveryState::Done,
                DeadLetterStatus::New | DeadLetterStatus::Failed => DeliveryState::DeadLettered,
            };
            outcomes.insert(letter.fields.delivery_id.clone(), outcome);
        }
        outcomes
    }

    fn delivery(&self, entry: &LogEntry, outcomes: &HashMap<String, DeliveryState>) -> Option<TracedDelivery> {
        let domain = Domain::ALL.into_iter().find(|domain| *self.topics.outbox(*domain) == *entry.topic)?;
        let message = envelope::delivery_in(&entry.value)?;
        let is_acked = entry.groups.iter().any(|group| group.done);
        let state = match (is_acked, outcomes.get(&message.delivery_id)) {
            (_, Some(outcome)) => *outcome,
            (true, None) => DeliveryState::Done,
            (false, None) => DeliveryState::Pending,
        };
        Some(TracedDelivery {
            subscription_id: Uuid::parse_str(&message.subscription_id).ok()?,
            domain,
            position: position(entry),
            state,
        })
    }
}

fn position(entry: &LogEntry) -> TopicPosition {
    TopicPosition {
        topic: entry.topic.clone(),
        partition: entry.partition,
        offset: u64::try_from(entry.offset).unwrap_or_default(),
    }
}

fn outbox_state(row: OutboxRow) -> OutboxState {
    let pending = matches!(row.status, outbox::OutboxStatus::New | outbox::OutboxStatus::Retry);
    OutboxState {
        status: match row.status {
            outbox::OutboxStatus::New => OutboxStatus::New,
            outbox::OutboxStatus::Done => OutboxStatus::Processed,
            outbox::OutboxStatus::Retry | outbox::OutboxStatus::Dead => OutboxStatus::Failed,
        },
        exhausted: row.status == outbox::OutboxStatus::Dead,
        attempts: row.attempts,
        next_attempt_at: pending.then_some(row.available_at),
        last_error: row.last_error,
        created_at: row.created_at,
        processed_at: row.done_at,
    }
}
