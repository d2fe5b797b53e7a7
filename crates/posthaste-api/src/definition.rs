use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::checks::Errors;
use crate::event::{MAX_NAME, is_event_type};
use crate::input::Input;
use crate::problem::FieldError;

/// Matches every value of a part of an event key, and its absence.
pub const ANY: &str = "*";

/// The longest description, in characters.
const MAX_DESCRIPTION: usize = 1_000;

/// Selects events: each part is a value or [`ANY`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EventKey {
    /// The service that publishes the events.
    #[serde(default = "any")]
    pub source_service: String,
    /// The type of the events.
    #[serde(default = "any")]
    pub event_type: String,
    /// The type of the resource that the events are about.
    #[serde(default = "any")]
    pub resource_type: String,
    /// The operation on the resource.
    #[serde(default = "any")]
    pub operation_type: String,
}

/// A kind of event that can be subscribed to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Definition {
    /// The id that subscriptions refer to.
    pub id: Uuid,
    /// The events; in JSON its parts are beside the other fields.
    #[serde(flatten)]
    pub key: EventKey,
    /// A description for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
}

/// A definition as it is made or replaced. An absent part of the key means [`ANY`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DefinitionIn {
    /// The service that publishes the events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_service: Option<String>,
    /// The type of the events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event_type: Option<String>,
    /// The type of the resource that the events are about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_type: Option<String>,
    /// The operation on the resource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation_type: Option<String>,
    /// A description for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
}

impl EventKey {
    /// True if the key matches an event with these parts.
    pub fn matches(
        &self,
        source_service: Option<&str>,
        event_type: &str,
        resource_type: Option<&str>,
        operation_type: Option<&str>,
    ) -> bool {
        let is = |part: &str, value: Option<&str>| part == ANY || value == Some(part);
        is(&self.source_service, source_service)
            && is(&self.event_type, Some(event_type))
            && is(&self.resource_type, resource_type)
            && is(&self.operation_type, operation_type)
    }

    /// Adds the violations of the key; `inside` is the field that contains the key, with a dot.
    pub(crate) fn check(&self, inside: &str, errors: &mut Errors) {
        if self.event_type != ANY && !is_event_type(&self.event_type) {
            let detail = "is neither * nor 1 to 128 characters of A-Z a-z 0-9 . _ -";
            errors.add(&format!("{inside}eventType"), detail);
        }
        for (field, part) in [
            ("sourceService", &self.source_service),
            ("resourceType", &self.resource_type),
            ("operationType", &self.operation_type),
        ] {
            errors.check_name(&format!("{inside}{field}"), part, MAX_NAME, "; * means any");
        }
    }
}

impl Default for EventKey {
    /// Every event.
    fn default() -> Self {
        Self { source_service: any(), event_type: any(), resource_type: any(), operation_type: any() }
    }
}

impl DefinitionIn {
    /// The key and the description, or everything that is wrong with them.
    pub fn validate(self) -> Result<(EventKey, Option<String>), Vec<FieldError>> {
        let key = EventKey {
            source_service: self.source_service.unwrap_or_else(any),
            event_type: self.event_type.unwrap_or_else(any),
            resource_type: self.resource_type.unwrap_or_else(any),
            operation_type: self.operation_type.unwrap_or_else(any),
        };
        let mut errors = Errors::default();
        key.check("", &mut errors);
        if let Some(description) = &self.description {
            errors.check_note("description", description, MAX_DESCRIPTION);
        }
        errors.none_or((key, self.description))
    }
}

impl Input for DefinitionIn {
    type Checked = (EventKey, Option<String>);

    fn validate(self) -> Result<Self::Checked, Vec<FieldError>> {
        DefinitionIn::validate(self)
    }
}

fn any() -> String {
    ANY.to_owned()
}
