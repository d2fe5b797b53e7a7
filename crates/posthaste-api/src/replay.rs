use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::checks::Errors;
use crate::dead_letter::DeadLetterStatus;
use crate::input::Input;
use crate::problem::FieldError;

/// The dead letters to send again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplayIn {
    /// The `id`s of dead letters.
    #[serde(default)]
    pub ids: Vec<Uuid>,
    /// Why, for the audit log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl ReplayIn {
    /// The most dead letters that one call may name.
    pub const MAX_IDS: usize = 10_000;
    /// The longest reason, in characters.
    pub const MAX_REASON: usize = 1_000;

    /// Checks the sizes. The server checks if the ids exist.
    pub fn validate(self) -> Result<Self, Vec<FieldError>> {
        let mut errors = Errors::default();
        if self.ids.is_empty() {
            errors.add("ids", "is empty: name at least one dead letter");
        }
        if self.ids.len() > Self::MAX_IDS {
            errors.add("ids", format!("has {} ids, more than {}", self.ids.len(), Self::MAX_IDS));
        }
        if let Some(reason) = &self.reason {
            errors.check_note("reason", reason, Self::MAX_REASON);
        }
        errors.none_or(self)
    }
}

impl Input for ReplayIn {
    type Checked = Self;

    fn validate(self) -> Result<Self, Vec<FieldError>> {
        ReplayIn::validate(self)
    }
}

/// The response to a replay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplayOut {
    /// The id of the replay, to ask for its progress; null for a dry run.
    pub replay_id: Option<Uuid>,
    /// How many dead letters it matched.
    pub matched: u64,
    /// The result for each, if the caller waited for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub results: Option<Vec<ReplayResult>>,
}

/// The result for one replayed dead letter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplayResult {
    /// The dead letter.
    pub id: Uuid,
    /// Its status afterwards.
    pub status: DeadLetterStatus,
    /// Why it failed again; null when it was delivered.
    pub error_code: Option<String>,
}
