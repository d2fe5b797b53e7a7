//! The words of the dead-letter store, the same on every database.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, Utc};

/// A delivery that is to be kept because its immediate attempts are spent.
#[derive(Clone, Debug)]
pub struct NewLetter {
    /// Identifies the delivery: taking the same one in again changes nothing.
    pub delivery_id: String,
    /// Which event it is of.
    pub event_id: String,
    /// For which subscription.
    pub subscription_id: String,
    /// Whose subscription that is.
    pub subscriber_id: String,
    /// The type of the event.
    pub event_type: String,
    /// The domain whose dead-letter topic it came from.
    pub domain: String,
    /// Where it was to go.
    pub endpoint: String,
    /// The OutboxEvent in Protobuf.
    pub envelope: Bytes,
    /// The same as JSON, for people and for the search.
    pub readable: String,
    /// How many requests were made so far.
    pub attempts: u32,
    /// Why the last one failed.
    pub error: String,
    /// The same as a code.
    pub error_code: String,
    /// What lay behind it.
    pub error_cause: Option<String>,
    /// When the first request failed.
    pub first_failed_at: DateTime<Utc>,
    /// How long until its first scheduled retry; `None`: there is none.
    pub first_delay: Option<Duration>,
}

/// A claimed letter.
#[derive(Clone, Debug)]
pub struct Letter {
    /// Its own id.
    pub id: String,
    /// Why it is tried now.
    pub trigger: Trigger,
    /// Which event it is of.
    pub event_id: String,
    /// For which subscription.
    pub subscription_id: String,
    /// Whose subscription that is.
    pub subscriber_id: String,
    /// The type of the event.
    pub event_type: String,
    /// Its domain.
    pub domain: String,
    /// Where it is to go.
    pub endpoint: String,
    /// The OutboxEvent in Protobuf.
    pub envelope: Bytes,
    /// How many requests were ever made for it.
    pub attempts: u32,
    /// How many of them were scheduled retries.
    pub retry_count: u32,
    /// When the first request failed.
    pub first_failed_at: DateTime<Utc>,
    pub(crate) lock: String,
}

/// Why a letter is tried again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// Its time has come.
    Scheduled,
    /// Somebody asked for it.
    Replay {
        /// Which request that was.
        replay_id: String,
    },
}

/// Where a letter stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LetterStatus {
    /// Not tried since it was taken in.
    New,
    /// Delivered in the end.
    Processed,
    /// Tried, and failed.
    Failed,
}

impl LetterStatus {
    /// The code in the database.
    pub(crate) fn code(self) -> i64 {
        match self {
            Self::New => 0,
            Self::Processed => 1,
            Self::Failed => 2,
        }
    }

    pub(crate) fn of_code(code: i64) -> Self {
        match code {
            0 => Self::New,
            1 => Self::Processed,
            _ => Self::Failed,
        }
    }
}

/// A letter as an operator's list shows it.
#[derive(Clone, Debug)]
pub struct LetterRow {
    /// Its own id.
    pub id: String,
    /// The delivery that failed.
    pub delivery_id: String,
    /// Which event it is of.
    pub event_id: String,
    /// For which subscription.
    pub subscription_id: String,
    /// Whose subscription that is.
    pub subscriber_id: String,
    /// The type of the event.
    pub event_type: String,
    /// Its domain.
    pub domain: String,
    /// Where it is to go.
    pub endpoint: String,
    /// Where it stands.
    pub status: LetterStatus,
    /// How many scheduled retries were made.
    pub retry_count: u32,
    /// How many requests were ever made.
    pub attempts: u32,
    /// Why the last one failed.
    pub error: String,
    /// The same as a code.
    pub error_code: String,
    /// What lay behind it.
    pub error_cause: Option<String>,
    /// When the first request failed.
    pub first_failed_at: DateTime<Utc>,
    /// When its next retry is due.
    pub scheduled_at: Option<DateTime<Utc>>,
    /// The replay it waits for.
    pub replay_id: Option<String>,
    /// When it was taken in.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
}

/// One letter with all that is known of it.
#[derive(Clone, Debug)]
pub struct LetterDetail {
    /// What the list shows.
    pub letter: LetterRow,
    /// The OutboxEvent in Protobuf.
    pub envelope: Bytes,
    /// The same as JSON.
    pub readable: String,
    /// Its scheduled and replayed attempts, oldest first.
    pub history: Vec<HistoryRow>,
}

/// One scheduled or replayed attempt.
#[derive(Clone, Debug)]
pub struct HistoryRow {
    /// `None`: it succeeded.
    pub error_code: Option<String>,
    /// Why it failed.
    pub error_message: Option<String>,
    /// What lay behind that.
    pub error_cause: Option<String>,
    /// When it ended.
    pub process_date: DateTime<Utc>,
    /// Why it was made.
    pub trigger: Trigger,
    /// How long it took.
    pub duration: Duration,
}

/// Which letters to list, and how. Every given condition must hold.
#[derive(Clone, Debug)]
pub struct LetterFilter {
    /// The event's id.
    pub message_id: Option<String>,
    /// Whose letters.
    pub subscriber_id: Option<String>,
    /// Part of the error text, ignoring case.
    pub error: Option<String>,
    /// Taken in at or after this time.
    pub from: Option<DateTime<Utc>>,
    /// Taken in at or before this time.
    pub to: Option<DateTime<Utc>>,
    /// Where they stand; `None` for anywhere.
    pub status: Option<LetterStatus>,
    /// Of which domain.
    pub domain: Option<String>,
    /// Of which event type.
    pub event_type: Option<String>,
    /// A search, ignoring case: event id and subscriber by their beginning, error by a part; the payload too, by a
    /// part, when `from` and `to` span at most 24 hours.
    pub q: Option<String>,
    /// In which order.
    pub sort: LetterSort,
    /// Where the page begins; instead of `page`, which must read all pages before it.
    pub cursor: Option<LetterCursor>,
    /// From 0.
    pub page: u32,
    /// How many to a page.
    pub size: u32,
}

impl Default for LetterFilter {
    fn default() -> Self {
        Self {
            message_id: None,
            subscriber_id: None,
            error: None,
            from: None,
            to: None,
            status: None,
            domain: None,
            event_type: None,
            q: None,
            sort: LetterSort { by: LetterSortKey::CreatedAt, descending: true },
            cursor: None,
            page: 0,
            size: 50,
        }
    }
}

/// Where a page of a list ended. What is added or removed meanwhile moves no letter from one page to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LetterCursor {
    /// The order of the list that it belongs to.
    pub sort: LetterSort,
    pub(crate) key: i64,
    pub(crate) id: String,
}

impl LetterCursor {
    pub(crate) fn behind(last: &LetterRow, sort: LetterSort) -> Self {
        let key = match sort.by {
            LetterSortKey::CreatedAt => last.created_at.timestamp_millis(),
            LetterSortKey::UpdatedAt => last.updated_at.timestamp_millis(),
            LetterSortKey::RetryCount => i64::from(last.retry_count),
        };
        Self { sort, key, id: last.id.clone() }
    }
}

/// A text that was never shown as a cursor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not a cursor of this list: take it from nextCursor of the page before")]
pub struct BadCursor;

impl fmt::Display for LetterCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}~{}~{}", self.sort, self.key, self.id)
    }
}

impl FromStr for LetterCursor {
    type Err = BadCursor;

    fn from_str(text: &str) -> Result<Self, BadCursor> {
        let mut parts = text.splitn(3, '~');
        let mut part = || parts.next().ok_or(BadCursor);
        let sort = part()?.parse().map_err(|_| BadCursor)?;
        let key = part()?.parse().map_err(|_| BadCursor)?;
        Ok(Self { sort, key, id: part()?.to_owned() })
    }
}

/// The order of a list; ties in the order of intake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LetterSort {
    /// What it goes by.
    pub by: LetterSortKey,
    /// Largest or newest first.
    pub descending: bool,
}

impl fmt::Display for LetterSort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.descending { "-" } else { "" })?;
        f.write_str(match self.by {
            LetterSortKey::CreatedAt => "createdAt",
            LetterSortKey::UpdatedAt => "updatedAt",
            LetterSortKey::RetryCount => "retryCount",
        })
    }
}

/// A text that names no order.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is none of createdAt, updatedAt, retryCount, with - before for descending")]
pub struct BadSort;

impl FromStr for LetterSort {
    type Err = BadSort;

    fn from_str(text: &str) -> Result<Self, BadSort> {
        let (descending, name) = match text.strip_prefix('-') {
            Some(name) => (true, name),
            None => (false, text),
        };
        let by = match name {
            "createdAt" => LetterSortKey::CreatedAt,
            "updatedAt" => LetterSortKey::UpdatedAt,
            "retryCount" => LetterSortKey::RetryCount,
            _ => return Err(BadSort),
        };
        Ok(Self { by, descending })
    }
}

/// What a list can be sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LetterSortKey {
    /// When it was taken in.
    CreatedAt,
    /// When it last changed.
    UpdatedAt,
    /// How many scheduled retries were made.
    RetryCount,
}

/// One page of a list.
#[derive(Clone, Debug)]
pub struct LetterPage {
    /// The letters of this page.
    pub items: Vec<LetterRow>,
    /// How many there are in all.
    pub total: u64,
    /// There are more than that; nobody counted them.
    pub total_is_lower_bound: bool,
    /// Where the next page begins, if there is one.
    pub next: Option<LetterCursor>,
}

/// A request to deliver letters again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replay {
    /// Its own id.
    pub id: String,
    /// How many letters it took on.
    pub matched: u64,
}

/// How far a replay has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayResults {
    /// Letters not tried yet.
    pub pending: usize,
    /// One per letter that was.
    pub results: Vec<ReplayResult>,
}

/// What a replay did to one letter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayResult {
    /// Which letter.
    pub letter_id: String,
    /// Processed or failed.
    pub status: LetterStatus,
    /// Why it failed.
    pub error_code: Option<String>,
}
