//! Lists of dead letters: filter, order, cursor and page.

use std::fmt;
use std::str::FromStr;

use chrono::{DateTime, TimeDelta, Utc};

use super::{DeadLetterRow, DeadLetterStatus};

/// The widest range of time in which payloads are searched. Payloads have no index.
const SEARCHABLE: TimeDelta = TimeDelta::hours(24);

/// Which dead letters to list, and how. Every given condition must hold.
#[derive(Clone, Debug)]
pub struct DeadLetterFilter {
    /// The id of the event.
    pub message_id: Option<String>,
    /// The subscriber.
    pub subscriber_id: Option<String>,
    /// Part of the error text, ignoring case.
    pub error: Option<String>,
    /// Inserted at or after this time.
    pub from: Option<DateTime<Utc>>,
    /// Inserted at or before this time.
    pub to: Option<DateTime<Utc>>,
    /// The status; `None` for any.
    pub status: Option<DeadLetterStatus>,
    /// The domain.
    pub domain: Option<String>,
    /// The type of the event.
    pub event_type: Option<String>,
    /// A text to search for, ignoring case. It matches the beginning of the event id or of the subscriber, or a part of
    /// the error. It also matches a part of the payload if [`searches_payloads`](Self::searches_payloads).
    pub q: Option<String>,
    /// The order.
    pub sort: DeadLetterSort,
    /// The end of the previous page. Cheaper than `page`, which must read all pages before it.
    pub cursor: Option<DeadLetterCursor>,
    /// The number of the page, from 0. Not used with a cursor.
    pub page: u32,
    /// The number of dead letters per page.
    pub size: u32,
}

impl DeadLetterFilter {
    /// True if `from` and `to` span at most 24 hours, so that the search may read payloads.
    pub fn searches_payloads(&self) -> bool {
        matches!((self.from, self.to), (Some(from), Some(to)) if to - from <= SEARCHABLE)
    }
}

impl Default for DeadLetterFilter {
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
            sort: DeadLetterSort { by: DeadLetterSortKey::CreatedAt, descending: true },
            cursor: None,
            page: 0,
            size: 50,
        }
    }
}

/// The end of a page of a list. Inserts and deletes between two requests neither repeat nor skip other dead letters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetterCursor {
    /// The order of the list that it belongs to.
    pub sort: DeadLetterSort,
    /// The sort key of the last dead letter of the page; times are milliseconds since 1970.
    pub key: i64,
    /// The id of the last dead letter of the page.
    pub id: String,
}

impl DeadLetterCursor {
    /// The cursor of the page after this dead letter.
    pub fn after(last: &DeadLetterRow, sort: DeadLetterSort) -> Self {
        let key = match sort.by {
            DeadLetterSortKey::CreatedAt => last.created_at.timestamp_millis(),
            DeadLetterSortKey::UpdatedAt => last.updated_at.timestamp_millis(),
            DeadLetterSortKey::RetryCount => i64::from(last.retry_count),
        };
        Self { sort, key, id: last.id.clone() }
    }
}

/// The text is not a cursor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not a cursor of this list: take it from nextCursor of the page before")]
pub struct BadCursor;

impl fmt::Display for DeadLetterCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}~{}~{}", self.sort, self.key, self.id)
    }
}

impl FromStr for DeadLetterCursor {
    type Err = BadCursor;

    fn from_str(text: &str) -> Result<Self, BadCursor> {
        let mut parts = text.splitn(3, '~');
        let mut part = || parts.next().ok_or(BadCursor);
        let sort = part()?.parse().map_err(|_| BadCursor)?;
        let key = part()?.parse().map_err(|_| BadCursor)?;
        Ok(Self { sort, key, id: part()?.to_owned() })
    }
}

/// The order of a list. Dead letters with equal keys are in the order of insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeadLetterSort {
    /// The sort key.
    pub by: DeadLetterSortKey,
    /// Largest or newest first.
    pub descending: bool,
}

impl fmt::Display for DeadLetterSort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.descending { "-" } else { "" })?;
        f.write_str(match self.by {
            DeadLetterSortKey::CreatedAt => "createdAt",
            DeadLetterSortKey::UpdatedAt => "updatedAt",
            DeadLetterSortKey::RetryCount => "retryCount",
        })
    }
}

/// The text is not the name of an order.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is none of createdAt, updatedAt, retryCount, with - before for descending")]
pub struct BadSort;

impl FromStr for DeadLetterSort {
    type Err = BadSort;

    fn from_str(text: &str) -> Result<Self, BadSort> {
        let (descending, name) = match text.strip_prefix('-') {
            Some(name) => (true, name),
            None => (false, text),
        };
        let by = match name {
            "createdAt" => DeadLetterSortKey::CreatedAt,
            "updatedAt" => DeadLetterSortKey::UpdatedAt,
            "retryCount" => DeadLetterSortKey::RetryCount,
            _ => return Err(BadSort),
        };
        Ok(Self { by, descending })
    }
}

/// A sort key of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeadLetterSortKey {
    /// When the dead letter was inserted.
    CreatedAt,
    /// When it last changed.
    UpdatedAt,
    /// How many scheduled retries were made.
    RetryCount,
}

/// One page of a list.
#[derive(Clone, Debug)]
pub struct DeadLetterPage {
    /// The dead letters of this page.
    pub items: Vec<DeadLetterRow>,
    /// How many dead letters meet the filter.
    pub total: u64,
    /// True if there are more than `total`: long lists are not counted to their end.
    pub total_is_lower_bound: bool,
    /// The cursor of the next page, if there is one.
    pub next: Option<DeadLetterCursor>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_as_it_was_shown() {
        let sort = DeadLetterSort { by: DeadLetterSortKey::RetryCount, descending: true };
        let cursor = DeadLetterCursor { sort, key: 7, id: "a~b".to_owned() };
        assert_eq!(cursor.to_string(), "-retryCount~7~a~b");
        assert_eq!(cursor.to_string().parse(), Ok(cursor));
        for text in ["", "createdAt", "createdAt~x~a", "size~1~a"] {
            assert_eq!(text.parse::<DeadLetterCursor>(), Err(BadCursor), "{text}");
        }
    }
}
