//! The audit log: what happened to each event, and what operators did.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};

use super::BadCursor;
use crate::StoreError;

/// The most bytes of a message, and of any other text of an entry.
pub const MAX_AUDIT_MESSAGE: usize = 500;
const MAX_TEXT: usize = 256;

/// The table of the audit log.
///
/// # Laws
///
/// Each is a test of that name in `posthaste-backend-tests` (`hub_laws`).
///
/// - `entries_are_kept_unchanged`, also with texts that a database cannot store as they are.
/// - `an_entry_is_kept_once`: appending an entry with a known id and time again changes nothing. A RECEIVED entry with a
///   known id changes nothing at any time: the process that accepts an event and the one that claims it both record it.
/// - `audit_lists_are_filtered_and_newest_first`.
/// - `a_page_of_the_audit_continues_after_its_cursor`, and pages by number give the same entries.
/// - `the_trail_of_an_event_is_oldest_first`, and has a limit.
/// - `expired_audit_entries_are_removed_oldest_first`, also by several processes at once.
///
/// A row that cannot be read MUST be reported and left out.
#[async_trait]
pub trait AuditStore: Send + Sync + 'static {
    /// Appends entries, all or none. It may wait for a database that is busy, so no delivery may wait for it.
    async fn append(&self, entries: Arc<Vec<AuditEntry>>) -> Result<(), StoreError>;

    /// One page of the entries that meet the filter, newest first.
    async fn list(&self, filter: &AuditFilter, page: &AuditPageRequest) -> Result<AuditPage, StoreError>;

    /// The entries of an event, oldest first, at most `limit`.
    async fn trail(&self, event_id: &str, limit: usize) -> Result<Vec<AuditEntry>, StoreError>;

    /// Removes entries that are older than this, the oldest first, at most `limit`. Returns how many; 0 if there are none
    /// left. Those that another process is removing are left to it.
    async fn remove_expired(&self, age: Duration, limit: usize) -> Result<u64, StoreError>;
}

/// What an entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LogType {
    /// The hub has accepted the event, or found it in a table.
    Received,
    /// It is on its event topic.
    Published,
    /// An attempt to publish it failed.
    PublishFailed,
    /// Its outbox row was given up.
    EventDead,
    /// A subscription matched it: the delivery is on the outbox topic of its domain.
    Routed,
    /// No subscription matched it.
    NoSubscription,
    /// A subscriber has accepted it.
    Executed,
    /// An attempt to deliver it failed.
    DeliveryFailed,
    /// The delivery is a dead letter.
    DeadLettered,
    /// A scheduled retry of a dead letter began.
    Retried,
    /// A replay of a dead letter began.
    Replayed,
    /// An operator requested a replay.
    ReplayRequested,
    /// A subscription was created, changed or deleted.
    SubscriptionChanged,
    /// An event definition was created, changed or deleted.
    DefinitionChanged,
    /// An operator paused a channel.
    ChannelPaused,
    /// An operator resumed a channel.
    ChannelResumed,
    /// A record could not be read.
    Quarantined,
    /// An operator replayed a quarantined record.
    QuarantineReplayed,
    /// An operator discarded a quarantined record.
    QuarantineDiscarded,
    /// An operator moved the position of a group.
    TopicReset,
}

impl LogType {
    /// All of them, in the order of their numbers in the column `log_type`.
    pub const ALL: [Self; 20] = [
        Self::Received,
        Self::Published,
        Self::PublishFailed,
        Self::EventDead,
        Self::Routed,
        Self::NoSubscription,
        Self::Executed,
        Self::DeliveryFailed,
        Self::DeadLettered,
        Self::Retried,
        Self::Replayed,
        Self::ReplayRequested,
        Self::SubscriptionChanged,
        Self::DefinitionChanged,
        Self::ChannelPaused,
        Self::ChannelResumed,
        Self::Quarantined,
        Self::QuarantineReplayed,
        Self::QuarantineDiscarded,
        Self::TopicReset,
    ];

    /// The attempts to deliver an event, and where they ended.
    pub const DELIVERIES: [Self; 3] = [Self::Executed, Self::DeliveryFailed, Self::DeadLettered];

    /// Those whose entries may have a subscription.
    pub const OF_SUBSCRIPTIONS: [Self; 7] = [
        Self::Routed,
        Self::Executed,
        Self::DeliveryFailed,
        Self::DeadLettered,
        Self::Retried,
        Self::Replayed,
        Self::SubscriptionChanged,
    ];

    /// The number in the column `log_type`.
    pub fn code(self) -> i16 {
        self as i16
    }

    /// The type of a number in the column `log_type`.
    pub fn of_code(code: i16) -> Option<Self> {
        usize::try_from(code).ok().and_then(|code| Self::ALL.get(code)).copied()
    }

    /// True for the beginning and the end of an event's way, for failures, and for what operators do.
    pub fn is_end(self) -> bool {
        !matches!(self, Self::Published | Self::Routed | Self::NoSubscription | Self::Retried | Self::Replayed)
    }

    /// The name in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Received => "RECEIVED",
            Self::Published => "PUBLISHED",
            Self::PublishFailed => "PUBLISH_FAILED",
            Self::EventDead => "EVENT_DEAD",
            Self::Routed => "ROUTED",
            Self::NoSubscription => "NO_SUBSCRIPTION",
            Self::Executed => "EXECUTED",
            Self::DeliveryFailed => "DELIVERY_FAILED",
            Self::DeadLettered => "DEAD_LETTERED",
            Self::Retried => "RETRIED",
            Self::Replayed => "REPLAYED",
            Self::ReplayRequested => "REPLAY_REQUESTED",
            Self::SubscriptionChanged => "SUBSCRIPTION_CHANGED",
            Self::DefinitionChanged => "DEFINITION_CHANGED",
            Self::ChannelPaused => "CHANNEL_PAUSED",
            Self::ChannelResumed => "CHANNEL_RESUMED",
            Self::Quarantined => "QUARANTINED",
            Self::QuarantineReplayed => "QUARANTINE_REPLAYED",
            Self::QuarantineDiscarded => "QUARANTINE_DISCARDED",
            Self::TopicReset => "TOPIC_RESET",
        }
    }
}

impl fmt::Display for LogType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The text is not the name of a log type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is none of {}", LogType::ALL.map(LogType::as_str).join(", "))]
pub struct UnknownLogType;

impl FromStr for LogType {
    type Err = UnknownLogType;

    fn from_str(text: &str) -> Result<Self, UnknownLogType> {
        Self::ALL.into_iter().find(|known| known.as_str().eq_ignore_ascii_case(text)).ok_or(UnknownLogType)
    }
}

/// One entry. It never has a payload, a secret or the address of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEntry {
    /// Its id, a UUID.
    pub id: String,
    /// When it happened, by the clock of the process, in microseconds.
    pub at: DateTime<Utc>,
    /// What happened.
    pub log_type: LogType,
    /// The event.
    pub event_id: Option<String>,
    /// The type of the event.
    pub event_type: Option<String>,
    /// The subscription.
    pub subscription_id: Option<String>,
    /// The subscriber.
    pub subscriber_id: Option<String>,
    /// The domain of the delivery.
    pub domain: Option<String>,
    /// The topic.
    pub topic: Option<String>,
    /// The number of the attempt.
    pub attempt: Option<u32>,
    /// The HTTP status with which the endpoint responded.
    pub status_code: Option<u16>,
    /// Why it failed: an HTTP status or a stable word.
    pub error_code: Option<String>,
    /// More, for people.
    pub message: Option<String>,
    /// How long the attempt took.
    pub duration: Option<Duration>,
}

impl AuditEntry {
    /// An entry of this type that happened at this time.
    pub fn new(id: String, at: DateTime<Utc>, log_type: LogType) -> Self {
        Self {
            id,
            at: DateTime::from_timestamp_micros(at.timestamp_micros()).unwrap_or(at),
            log_type,
            event_id: None,
            event_type: None,
            subscription_id: None,
            subscriber_id: None,
            domain: None,
            topic: None,
            attempt: None,
            status_code: None,
            error_code: None,
            message: None,
            duration: None,
        }
    }

    /// The event.
    #[must_use]
    pub fn event(self, id: &str, event_type: &str) -> Self {
        Self { event_id: text(id), event_type: text(event_type), ..self }
    }

    /// The subscription and its subscriber.
    #[must_use]
    pub fn subscription(self, id: &str, subscriber_id: &str) -> Self {
        Self { subscription_id: text(id), subscriber_id: text(subscriber_id), ..self }
    }

    /// The domain.
    #[must_use]
    pub fn domain(self, domain: &str) -> Self {
        Self { domain: text(domain), ..self }
    }

    /// The topic.
    #[must_use]
    pub fn topic(self, topic: &str) -> Self {
        Self { topic: text(topic), ..self }
    }

    /// The number of the attempt.
    #[must_use]
    pub fn attempt(self, attempt: u32) -> Self {
        Self { attempt: Some(attempt), ..self }
    }

    /// The code of an error.
    #[must_use]
    pub fn error_code(self, code: &str) -> Self {
        Self { error_code: text(code), ..self }
    }

    /// A message, cut to its longest length.
    #[must_use]
    pub fn message(self, message: &str) -> Self {
        Self { message: limited(message, MAX_AUDIT_MESSAGE), ..self }
    }

    /// How much memory it needs, about.
    pub fn size(&self) -> usize {
        let texts = [
            &self.event_id,
            &self.event_type,
            &self.subscription_id,
            &self.subscriber_id,
            &self.domain,
            &self.topic,
            &self.error_code,
            &self.message,
        ];
        size_of::<Self>() + self.id.len() + texts.into_iter().flatten().map(String::len).sum::<usize>()
    }
}

fn text(text: &str) -> Option<String> {
    limited(text, MAX_TEXT)
}

/// The text, cut to this many bytes. PostgreSQL cannot store U+0000.
fn limited(text: &str, longest: usize) -> Option<String> {
    let end = text.floor_char_boundary(longest);
    (end > 0).then(|| text[..end].replace('\0', " "))
}

/// Which entries to list. Every given condition must hold.
#[derive(Clone, Debug, Default)]
pub struct AuditFilter {
    /// The event.
    pub event_id: Option<String>,
    /// The subscription.
    pub subscription_id: Option<String>,
    /// One of these types; empty for any.
    pub log_types: Vec<LogType>,
    /// The HTTP status of an attempt.
    pub status_code: Option<u16>,
    /// At or after this time.
    pub from: Option<DateTime<Utc>>,
    /// At or before this time.
    pub to: Option<DateTime<Utc>>,
}

impl AuditFilter {
    /// The parts of which the list consists. Each part has its own index, which has the order of the list within the
    /// part. `None` is the part of all types.
    pub fn parts(&self) -> Vec<Option<LogType>> {
        if self.event_id.is_some() {
            // An event has few entries, whatever their types.
            return vec![None];
        }
        let wanted = |log_type: &LogType| self.log_types.is_empty() || self.log_types.contains(log_type);
        match (&self.subscription_id, self.status_code) {
            (Some(_), None) => LogType::OF_SUBSCRIPTIONS.into_iter().filter(wanted).map(Some).collect(),
            // Only requests have a status.
            (_, Some(_)) => {
                let requests = [LogType::Executed, LogType::DeliveryFailed];
                requests.into_iter().filter(wanted).map(Some).collect()
            }
            (None, None) if self.log_types.is_empty() => vec![None],
            (None, None) => self.log_types.iter().copied().map(Some).collect(),
        }
    }
}

/// Which page of a list.
#[derive(Clone, Debug)]
pub struct AuditPageRequest {
    /// The end of the previous page. Cheaper than `page`, which must read all pages before it.
    pub cursor: Option<AuditCursor>,
    /// The number of the page, from 0. Not used with a cursor.
    pub page: u32,
    /// The number of entries per page.
    pub size: u32,
}

impl AuditPageRequest {
    /// How many entries come before the page.
    pub fn offset(&self) -> i64 {
        match self.cursor {
            Some(_) => 0,
            None => i64::from(self.page) * i64::from(self.size),
        }
    }
}

impl Default for AuditPageRequest {
    fn default() -> Self {
        Self { cursor: None, page: 0, size: 50 }
    }
}

/// The end of a page of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditCursor {
    /// When the last entry of the page happened.
    pub at: DateTime<Utc>,
    /// The id of that entry.
    pub id: String,
}

impl fmt::Display for AuditCursor {
    /// `microseconds~id`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}~{}", self.at.timestamp_micros(), self.id)
    }
}

impl FromStr for AuditCursor {
    type Err = BadCursor;

    fn from_str(text: &str) -> Result<Self, BadCursor> {
        let (micros, id) = text.split_once('~').ok_or(BadCursor)?;
        let at = micros.parse().ok().and_then(DateTime::from_timestamp_micros).ok_or(BadCursor)?;
        let is_id = id.len() == 36 && id.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
        is_id.then(|| Self { at, id: id.to_owned() }).ok_or(BadCursor)
    }
}

/// One page of a list.
#[derive(Clone, Debug)]
pub struct AuditPage {
    /// The entries of this page.
    pub items: Vec<AuditEntry>,
    /// How many entries meet the filter.
    pub total: u64,
    /// True if there are more than `total`: long lists are not counted to their end.
    pub total_is_lower_bound: bool,
    /// The cursor of the next page, if there is one.
    pub next: Option<AuditCursor>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_type_is_read_as_it_is_written() {
        for (code, log_type) in LogType::ALL.into_iter().enumerate() {
            assert_eq!(log_type.code() as usize, code);
            assert_eq!(LogType::of_code(log_type.code()), Some(log_type));
            assert_eq!(log_type.as_str().parse(), Ok(log_type));
        }
        assert_eq!(LogType::of_code(-1).or(LogType::of_code(20)), None);
        assert_eq!("x".parse::<LogType>(), Err(UnknownLogType));
    }

    #[test]
    fn texts_are_cut_at_a_character_and_have_no_nul() {
        let entry =
            AuditEntry::new(String::new(), Utc::now(), LogType::Executed).message(&"ü".repeat(400)).event("a\0b", "");
        assert_eq!(entry.message.unwrap().len(), MAX_AUDIT_MESSAGE);
        assert_eq!((entry.event_id.as_deref(), entry.event_type), (Some("a b"), None));
    }

    #[test]
    fn a_cursor_is_read_as_it_was_shown() {
        let id = "0190d0c0-1111-7abc-8def-0123456789ab".to_owned();
        let cursor = AuditCursor { at: DateTime::from_timestamp_micros(1_750_000_000_123_456).unwrap(), id };
        assert_eq!(cursor.to_string().parse(), Ok(cursor));
        for text in ["", "1", "1~x", "x~00000000-0000-0000-0000-000000000000"] {
            assert_eq!(text.parse::<AuditCursor>(), Err(BadCursor), "{text}");
        }
    }
}
