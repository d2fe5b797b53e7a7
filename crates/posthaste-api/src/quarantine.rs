use chrono::{DateTime, Utc};
use posthaste_core::hub_store::{self, QuarantineCursor, QuarantineFilter};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::base64_bytes::Base64;
use crate::checks::{Errors, read_time};
use crate::headers::Headers;
use crate::input::Input;
use crate::problem::FieldError;

/// A record that a group could not read, as a list shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QuarantinedRecord {
    /// The id for a replay or a discard.
    pub id: Uuid,
    /// The group that could not read it.
    pub group: String,
    /// Its topic.
    pub topic: String,
    /// Its partition.
    pub partition: u32,
    /// Its offset in the partition.
    pub offset: i64,
    /// Its key; in a list, the first 256 characters.
    pub key: String,
    /// The size of its value in bytes.
    pub size: u64,
    /// Why it could not be read; in a list, the first 1,000 characters.
    pub reason: String,
    /// Its status.
    pub status: QuarantineStatus,
    /// Why it was discarded, or why its last replay failed.
    pub status_reason: Option<String>,
    /// False if the bus itself could not read it: it cannot be published as it was.
    pub replayable: bool,
    /// When it was quarantined.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
}

/// The status of a quarantined record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum QuarantineStatus {
    /// It waits for an operator.
    Quarantined,
    /// It was published again.
    Replayed,
    /// An operator has decided that it is not needed.
    Discarded,
}

impl QuarantineStatus {
    /// The name in JSON and query strings.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Quarantined => "QUARANTINED",
            Self::Replayed => "REPLAYED",
            Self::Discarded => "DISCARDED",
        }
    }
}

impl From<hub_store::QuarantineStatus> for QuarantineStatus {
    fn from(status: hub_store::QuarantineStatus) -> Self {
        match status {
            hub_store::QuarantineStatus::Quarantined => Self::Quarantined,
            hub_store::QuarantineStatus::Replayed => Self::Replayed,
            hub_store::QuarantineStatus::Discarded => Self::Discarded,
        }
    }
}

/// A page of the list of quarantined records, newest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QuarantinePage {
    /// The records of this page.
    pub items: Vec<QuarantinedRecord>,
    /// The most records of a page.
    pub size: u32,
    /// How many records there are on all pages.
    pub total: u64,
    /// True if there are more records than were counted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub total_is_lower_bound: bool,
    /// The `cursor` of the next page; absent on the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// One quarantined record with its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QuarantinedDetail {
    /// What the list shows, with whole texts; in JSON its fields are beside the others.
    #[serde(flatten)]
    pub record: QuarantinedRecord,
    /// The headers of the record.
    pub headers: Headers,
    /// The value of the record. Credentials in it are encrypted.
    pub value_base64: Base64,
}

/// The records to replay or to discard: `ids`, or those in quarantine that meet a `filter`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct QuarantineActionIn {
    /// The `id`s of records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<Vec<Uuid>>,
    /// The conditions that the records meet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<QuarantineFilterIn>,
    /// True for all records: instead of a filter, or with one that has no condition.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
    /// The `nextCursor` of the response before, with the same filter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
    /// Why, for the log; it is also kept with a discarded record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The conditions of a replay or a discard, by the names of the list's query. Every given condition must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct QuarantineFilterIn {
    /// The group that could not read the record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The topic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topic: Option<String>,
    /// Quarantined at or after this time (RFC 3339).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Quarantined at or before this time (RFC 3339).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

/// The body of a replay.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct QuarantineReplayIn(pub QuarantineActionIn);

/// The body of a discard, which needs a reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct QuarantineDiscardIn(pub QuarantineActionIn);

/// A replay or a discard that obeys every rule.
#[derive(Clone, Debug)]
pub struct QuarantineAction {
    /// The records.
    pub selection: QuarantineSelection,
    /// Why; never empty for a discard.
    pub reason: String,
}

/// Quarantined records.
#[derive(Clone, Debug)]
pub enum QuarantineSelection {
    /// Those with these ids.
    Ids(Vec<Uuid>),
    /// Those that meet the filter, after the cursor.
    Matching {
        /// The filter.
        filter: QuarantineFilter,
        /// The end of the part that was selected before.
        after: Option<QuarantineCursor>,
    },
}

impl QuarantineFilterIn {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl QuarantineActionIn {
    /// The most records that one call may name.
    pub const MAX_IDS: usize = 1_000;
    /// The longest reason, in characters.
    pub const MAX_REASON: usize = 1_000;
    /// The fields of which one is needed.
    const SELECTING: &[&[&str]] = &[&["ids", "filter", "all"]];

    fn validate(self, needs_reason: bool) -> Result<QuarantineAction, Vec<FieldError>> {
        let mut errors = Errors::default();
        let reason = self.reason.clone().unwrap_or_default();
        if needs_reason && reason.trim().is_empty() {
            errors.add("reason", "is missing: say why the records are not needed");
        }
        errors.check_note("reason", &reason, Self::MAX_REASON);
        let selection = self.selection(&mut errors);
        errors.none_or(QuarantineAction { selection, reason })
    }

    fn selection(self, errors: &mut Errors) -> QuarantineSelection {
        let filters = self.filter.is_some() || self.all;
        if let Some(ids) = self.ids {
            if filters || self.cursor.is_some() {
                errors.add("ids", "is given together with filter, all or cursor: give only the ids, or only a filter");
            }
            if ids.is_empty() {
                errors.add("ids", "is empty: name at least one record");
            }
            if ids.len() > Self::MAX_IDS {
                errors.add("ids", format!("has {} ids, more than {}", ids.len(), Self::MAX_IDS));
            }
            return QuarantineSelection::Ids(ids);
        }
        if !filters {
            errors.add("ids", "is missing: give ids, a filter, or \"all\": true");
        }
        let filter = self.filter.unwrap_or_default();
        match (filter.is_empty(), self.all) {
            (true, false) if filters => {
                errors.add("filter", "has no condition and matches all records: add \"all\": true if you mean them");
            }
            (false, true) => errors.add("all", "is true, and the filter has conditions: leave out one of them"),
            _ => {}
        }
        let after = self.cursor.map(|text| text.parse::<QuarantineCursor>());
        if let Some(Err(error)) = &after {
            errors.add("cursor", error.to_string());
        }
        let QuarantineFilterIn { group, topic, from, to } = filter;
        let (from, to) = (read_time("filter.from", from, &mut errors.0), read_time("filter.to", to, &mut errors.0));
        let status = Some(hub_store::QuarantineStatus::Quarantined);
        let filter = QuarantineFilter { group, topic, status, from, to };
        QuarantineSelection::Matching { filter, after: after.and_then(Result::ok) }
    }
}

impl Input for QuarantineReplayIn {
    type Checked = QuarantineAction;

    const EITHER: &[&[&str]] = QuarantineActionIn::SELECTING;

    fn validate(self) -> Result<QuarantineAction, Vec<FieldError>> {
        self.0.validate(false)
    }
}

impl Input for QuarantineDiscardIn {
    type Checked = QuarantineAction;

    const EITHER: &[&[&str]] = QuarantineActionIn::SELECTING;

    fn validate(self) -> Result<QuarantineAction, Vec<FieldError>> {
        self.0.validate(true)
    }
}

/// The response to a replay or a discard.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QuarantineResults {
    /// The result for each record.
    pub results: Vec<QuarantineResult>,
    /// The `cursor` of the next request with the same filter; absent if no more records met it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// The result for one record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QuarantineResult {
    /// The record.
    pub id: Uuid,
    /// Its status afterwards; null if there is no record with this id.
    pub status: Option<QuarantineStatus>,
    /// Why it was not replayed or discarded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}
