use std::collections::HashMap;

use posthaste_api::proto::OutboxEvent;
use posthaste_api::{DeliveryState, Domain, EventTrace, OutboxState, OutboxStatus, TopicPosition, TracedDelivery};
use posthaste_core::StoreError;
use posthaste_core::outbox::{self, OutboxRow, OperatorStore};
use posthaste_sql::letters::{LetterRow, LetterStatus};
use posthaste_sql::sqlite::LogEntry;
use prost::Message;
use uuid::Uuid;

use crate::Hub;
use crate::letters;

impl Hub {
    /// Where an event is: its row, its records on the bus, its deliveries, its dead letters. `None`: never heard of it.
    pub async fn trace(&self, event_id: &str) -> Result<Option<EventTrace>, StoreError> {
        let row = self.outbox.store().find(event_id).await?;
        let records = self.log.records_of(event_id).await?;
        let dead_letters = self.letters.of_event(event_id).await?;
        if row.is_none() && records.is_empty() && dead_letters.is_empty() {
            return Ok(None);
        }
        let fates = self.fates(&records, &dead_letters);
        let deliveries = records.iter().filter_map(|entry| self.delivery(entry, &fates)).collect();
        Ok(Some(EventTrace {
            event_id: event_id.to_owned(),
            outbox: row.map(outbox_state),
            topics: records.iter().map(position).collect(),
            deliveries,
            dead_letters: dead_letters.into_iter().map(letters::shown).collect(),
        }))
    }

    /// The deliveries that were dead-lettered, by their ids, and whether each was delivered in the end. A letter that is on
    /// its topic and not in the store yet counts, too.
    fn fates(&self, records: &[LogEntry], letters: &[LetterRow]) -> HashMap<String, DeliveryState> {
        let dlts = Domain::ALL.map(|domain| self.topics.dlt(domain));
        let on_topic = records.iter().filter(|entry| dlts.iter().any(|topic| **topic == *entry.topic));
        let on_topic = on_topic.filter_map(|entry| OutboxEvent::decode(entry.value.clone()).ok());
        let mut fates: HashMap<String, DeliveryState> =
            on_topic.map(|message| (message.delivery_id, DeliveryState::DeadLettered)).collect();
        for letter in letters {
            let fate = match letter.status {
                LetterStatus::Processed => DeliveryState::Done,
                LetterStatus::New | LetterStatus::Failed => DeliveryState::DeadLettered,
            };
            fates.insert(letter.delivery_id.clone(), fate);
        }
        fates
    }

    fn delivery(&self, entry: &LogEntry, fates: &HashMap<String, DeliveryState>) -> Option<TracedDelivery> {
        let domain = Domain::ALL.into_iter().find(|domain| *self.topics.outbox(*domain) == *entry.topic)?;
        let message = OutboxEvent::decode(entry.value.clone()).ok()?;
        let is_acked = entry.groups.iter().any(|group| group.done);
        let state = match (is_acked, fates.get(&message.delivery_id)) {
            (_, Some(fate)) => *fate,
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
