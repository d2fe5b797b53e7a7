use std::collections::HashMap;

use chrono::{DateTime, Utc};
use posthaste_api::{
    DeadLetter, DeliveryState, Domain, EarlierEvents, EventTrace, OutboxState, OutboxStatus, TopicPosition,
    TracedDelivery,
};
use posthaste_core::StoreError;
use posthaste_core::hub_store::{DeadLetterRow, DeadLetterStatus, LogEntry};
use posthaste_core::outbox::{self, OutboxRow};
use uuid::Uuid;

use crate::Hub;
use crate::dead_letters;
use crate::envelope;

/// The records and dead letters of one event, or of several with the same id.
type Found = (Vec<LogEntry>, Vec<DeadLetterRow>);

impl Hub {
    /// The state of an event: its row, its records on the bus, its deliveries, its dead letters. `None` if it is
    /// unknown. Of several events with the same id, the newest; what is left of the others is shown apart from it.
    pub async fn trace(&self, event_id: &str) -> Result<Option<EventTrace>, StoreError> {
        let row = self.stores.outbox.find(event_id).await?;
        let records = self.stores.inspector.records_of(event_id).await?;
        let letters = self.stores.dead_letters.of_event(event_id).await?;
        if row.is_none() && records.is_empty() && letters.is_empty() {
            return Ok(None);
        }
        let created_at = self.newest_created_at(row.as_ref(), &records, &letters).await?;
        let (newest, earlier) = self.separate(created_at, records, letters);
        let has_earlier = !(earlier.0.is_empty() && earlier.1.is_empty());
        let (topics, deliveries, dead_letters) = self.shown(newest);
        Ok(Some(EventTrace {
            event_id: event_id.to_owned(),
            outbox: row.map(outbox_state),
            topics,
            deliveries,
            dead_letters,
            earlier: has_earlier.then(|| {
                let (topics, deliveries, dead_letters) = self.shown(earlier);
                EarlierEvents { topics, deliveries, dead_letters }
            }),
        }))
    }

    /// When the outbox row of the newest event was created. The row itself may be removed, and the records, too.
    async fn newest_created_at(
        &self,
        row: Option<&OutboxRow>,
        records: &[LogEntry],
        letters: &[DeadLetterRow],
    ) -> Result<Option<DateTime<Utc>>, StoreError> {
        let on_bus = records.iter().filter_map(|entry| self.created_at_in(entry)).max();
        if let Some(created_at) = row.map(|row| row.created_at).or(on_bus) {
            return Ok(Some(created_at));
        }
        let Some(newest) = letters.last() else { return Ok(None) };
        let newest = self.stores.dead_letters.get(&newest.id).await?;
        Ok(newest.and_then(|letter| envelope::created_at_in_dead_letter(&letter.envelope)))
    }

    fn created_at_in(&self, entry: &LogEntry) -> Option<DateTime<Utc>> {
        envelope::event_created_at(&self.topics, &entry.topic, &entry.value)
    }

    /// The event whose row was created at this time, and earlier events with its id. If the time is not known, they
    /// cannot be told apart.
    fn separate(
        &self,
        created_at: Option<DateTime<Utc>>,
        records: Vec<LogEntry>,
        letters: Vec<DeadLetterRow>,
    ) -> (Found, Found) {
        let Some(created_at) = created_at else { return ((records, letters), Found::default()) };
        let (records, earlier_records) = records.into_iter().partition(|entry| match self.created_at_in(entry) {
            Some(time) => time == created_at,
            None => entry.created_at >= created_at,
        });
        let (letters, earlier_letters) =
            letters.into_iter().partition(|letter| envelope::is_dead_letter_of(letter, created_at));
        ((records, letters), (earlier_records, earlier_letters))
    }

    /// The topics and deliveries, or null if the bus cannot be searched, and the dead letters.
    fn shown(
        &self,
        (records, letters): Found,
    ) -> (Option<Vec<TopicPosition>>, Option<Vec<TracedDelivery>>, Vec<DeadLetter>) {
        let outcomes = self.dead_lettered(&records, &letters);
        let deliveries = records.iter().filter_map(|entry| self.delivery(entry, &outcomes)).collect();
        let is_searched = self.stores.inspector.has_key_index();
        let topics = is_searched.then(|| records.iter().map(position).collect());
        (topics, is_searched.then_some(deliveries), letters.into_iter().map(dead_letters::shown).collect())
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
