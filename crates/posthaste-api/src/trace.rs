use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::dead_letter::DeadLetter;
use crate::domain::Domain;

/// Where an event is, in all stages of the pipeline. If its id was used more than once, this is the newest event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventTrace {
    /// The event.
    pub event_id: String,
    /// Its row in the outbox table; null once it was purged.
    pub outbox: Option<OutboxState>,
    /// The topics to which it was published; null if the bus cannot be searched for an event, as on Kafka.
    pub topics: Option<Vec<TopicPosition>>,
    /// Its deliveries, one for each matching subscription; null if the bus cannot be searched for an event.
    pub deliveries: Option<Vec<TracedDelivery>>,
    /// The deliveries that failed.
    pub dead_letters: Vec<DeadLetter>,
    /// What is left of earlier events with the same id, whose rows were purged; absent if there is nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub earlier: Option<EarlierEvents>,
}

/// What is left of earlier events with the same id. The fields are those of [`EventTrace`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EarlierEvents {
    /// The topics to which they were published.
    pub topics: Option<Vec<TopicPosition>>,
    /// Their deliveries.
    pub deliveries: Option<Vec<TracedDelivery>>,
    /// Their deliveries that failed.
    pub dead_letters: Vec<DeadLetter>,
}

/// A row of the outbox table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OutboxState {
    /// Its status.
    pub status: OutboxStatus,
    /// True if it is given up: FAILED with no attempt left.
    pub exhausted: bool,
    /// How many failed attempts to publish it were counted.
    pub attempts: u32,
    /// When it is tried again.
    pub next_attempt_at: Option<DateTime<Utc>>,
    /// The last error.
    pub last_error: Option<String>,
    /// When it was stored.
    pub created_at: DateTime<Utc>,
    /// When it was published.
    pub processed_at: Option<DateTime<Utc>>,
}

/// The status of a row of the outbox table.
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
    /// The offset in the partition.
    pub offset: u64,
}

/// The delivery of an event to one subscription.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TracedDelivery {
    /// The subscription that matched.
    pub subscription_id: Uuid,
    /// The domain that it goes through.
    pub domain: Domain,
    /// Its message on the domain's outbox topic; in JSON the fields are beside the others.
    #[serde(flatten)]
    pub position: TopicPosition,
    /// Its state.
    pub state: DeliveryState,
}

/// The state of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum DeliveryState {
    /// Waiting or in flight.
    Pending,
    /// Delivered, perhaps after retries as a dead letter.
    Done,
    /// All its immediate attempts failed, and it is not delivered yet: see the dead letters.
    DeadLettered,
}
