use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::dead_letter::DeadLetter;
use crate::domain::Domain;

/// Where an event is: every place that knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventTrace {
    /// The event.
    pub event_id: String,
    /// Its row in the outbox table; null once it was purged.
    pub outbox: Option<OutboxState>,
    /// Where it was published.
    pub topics: Vec<TopicPosition>,
    /// To whom it is delivered.
    pub deliveries: Vec<TracedDelivery>,
    /// Which of those failed.
    pub dead_letters: Vec<DeadLetter>,
}

/// A row of the outbox table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OutboxState {
    /// Where it is in its life.
    pub status: OutboxStatus,
    /// Whether it is given up: FAILED with no attempt left.
    pub exhausted: bool,
    /// How many attempts to publish it counted.
    pub attempts: u32,
    /// When it is tried again.
    pub next_attempt_at: Option<DateTime<Utc>>,
    /// What went wrong last.
    pub last_error: Option<String>,
    /// When it was stored.
    pub created_at: DateTime<Utc>,
    /// When it was published.
    pub processed_at: Option<DateTime<Utc>>,
}

/// Where a row of the outbox table is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum OutboxStatus {
    /// Not published yet.
    New,
    /// Published.
    Processed,
    /// The last attempt failed.
    Failed,
}

/// A message on the bus.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TopicPosition {
    /// The topic.
    pub topic: String,
    /// The partition of the topic.
    pub partition: u32,
    /// The place in the partition.
    pub offset: u64,
}

/// An event on its way to one subscription.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TracedDelivery {
    /// The subscription that matched.
    pub subscription_id: Uuid,
    /// The domain that it goes through.
    pub domain: Domain,
    /// Its message on the domain's outbox topic; the fields stand beside the others.
    #[serde(flatten)]
    pub position: TopicPosition,
    /// How far it is.
    pub state: DeliveryState,
}

/// How far a delivery is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum DeliveryState {
    /// Waiting or under way.
    Pending,
    /// Delivered, if need be after retries as a dead letter.
    Done,
    /// Its immediate attempts are spent, and it is not delivered yet: see the dead letters.
    DeadLettered,
}
