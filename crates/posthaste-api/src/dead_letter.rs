use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::domain::Domain;

/// A delivery that failed too often, as a list shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeadLetter {
    /// The id for a replay.
    pub id: Uuid,
    /// The id of the event.
    pub message_id: String,
    /// The subscription that it was for.
    pub subscription_id: Uuid,
    /// The subscriber of that subscription.
    pub subscriber_id: String,
    /// The type of the event.
    pub event_type: String,
    /// The domain that it went through.
    pub domain: Domain,
    /// The address that was called.
    pub endpoint: String,
    /// Its status.
    pub status: DeadLetterStatus,
    /// How many scheduled retries were made; replays do not count.
    pub retry_count: u32,
    /// The last error.
    pub error: Option<String>,
    /// An HTTP status or a stable word for it.
    pub error_code: Option<String>,
    /// When it became a dead letter.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
}

/// The status of a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum DeadLetterStatus {
    /// No scheduled retry was made yet.
    New,
    /// Delivered after all.
    Processed,
    /// Retried without success; stays until it is replayed.
    Failed,
}

impl DeadLetterStatus {
    /// The name in JSON, query strings and the database.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::New => "NEW",
            Self::Processed => "PROCESSED",
            Self::Failed => "FAILED",
        }
    }
}

/// A page of a list of dead letters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeadLetterPage {
    /// The dead letters of this page.
    pub items: Vec<DeadLetter>,
    /// The number of the page, from 0; 0 for a page that a cursor selected.
    pub page: u32,
    /// The most dead letters of a page.
    pub size: u32,
    /// How many dead letters there are on all pages.
    pub total: u64,
    /// True if there are more dead letters than were counted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub total_is_lower_bound: bool,
    /// The `cursor` of the next page; absent on the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// All that is known about one dead letter.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeadLetterDetail {
    /// What the list shows; in JSON its fields are beside the others.
    #[serde(flatten)]
    pub letter: DeadLetter,
    /// The delivery in readable form, as [`readable`](crate::readable) writes it.
    pub event: Box<RawValue>,
    /// The immediate attempts, summed up.
    pub failure: Option<FailureSummary>,
    /// The scheduled retries and replays, oldest first.
    pub history: Vec<RetryAttempt>,
}

/// The immediate attempts before a delivery became a dead letter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FailureSummary {
    /// An HTTP status or a stable word, of the last attempt.
    pub code: String,
    /// What went wrong, for a person.
    pub message: String,
    /// The underlying cause.
    pub cause: Option<String>,
    /// How many requests were made.
    pub attempts: u32,
    /// When the first of them failed.
    pub first_failed_at: Option<DateTime<Utc>>,
    /// When the last of them failed.
    pub last_failed_at: Option<DateTime<Utc>>,
}

/// One scheduled retry or replay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RetryAttempt {
    /// An HTTP status or a stable word; null when it was delivered.
    pub error_code: Option<String>,
    /// What went wrong, for a person.
    pub error_message: Option<String>,
    /// The underlying cause.
    pub error_cause: Option<String>,
    /// When it was made.
    pub process_date: DateTime<Utc>,
    /// What triggered it.
    pub trigger: Trigger,
    /// How long it took.
    pub duration_ms: u64,
}

/// What triggered an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Trigger {
    /// The scheduler.
    Scheduled,
    /// An operator.
    Replay,
}
