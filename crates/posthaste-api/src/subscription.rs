use std::time::Duration;

use chrono::{DateTime, Utc};
use posthaste_core::filter::{Filter, FilterCondition};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::auth::{AuthIn, AuthOut};
use crate::checks::Errors;
use crate::definition::EventKey;
use crate::duration::parse_duration;
use crate::event::{MAX_NAME, MAX_TEXT};
use crate::filter::{self, FilterConditionIn};
use crate::headers::Headers;
use crate::problem::FieldError;
use crate::proto;

/// The longest time that one attempt may take.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(60);
/// The most retries after the first attempt.
const MAX_RETRY: u32 = 100;

/// Which subscriber receives which events, and at which endpoint. Secrets are never part of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Subscription {
    /// The id that calls refer to.
    pub id: Uuid,
    /// The subscriber, under a name of its own choice.
    pub subscriber_id: String,
    /// The definition of its events.
    pub definition_id: Uuid,
    /// The key of that definition.
    pub event_key: EventKey,
    /// The address that is called; the values of its query string are masked.
    pub endpoint: String,
    /// How it is called.
    pub protocol: Protocol,
    /// The assumed type of a payload without content type.
    pub payload_type: PayloadType,
    /// The parts of the credentials that may be shown.
    pub auth: AuthOut,
    /// Headers that are added to each request, with masked values.
    #[serde(default, skip_serializing_if = "Headers::is_empty")]
    pub headers: Headers,
    /// How long one attempt may take, if not the configured time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<String>,
    /// How many attempts may follow the first, if not the configured number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_retry: Option<u32>,
    /// Only events of this tenant; absent for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant_id: Option<String>,
    /// Only events with a JSON payload for which all of these hold; absent for all events.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub filter: Vec<FilterCondition>,
    /// False if no events are to be matched to it.
    pub active: bool,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
}

/// A subscription as it is made or replaced.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SubscriptionIn {
    /// The subscriber: required.
    #[serde(default)]
    pub subscriber_id: String,
    /// An existing definition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub definition_id: Option<String>,
    /// The key of an existing definition, instead of its id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event_key: Option<EventKey>,
    /// The address to call: required. The server checks if it may be called.
    #[serde(default)]
    pub endpoint: String,
    /// How to call it.
    #[serde(default)]
    pub protocol: Protocol,
    /// The assumed type of a payload without content type.
    #[serde(default)]
    pub payload_type: PayloadType,
    /// The credentials. Absent: none in a new subscription, the stored ones in an update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth: Option<AuthIn>,
    /// Headers to add to each request. Absent: none in a new subscription, the stored ones in an update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers: Option<Headers>,
    /// How long one attempt may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<String>,
    /// How many attempts may follow the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_retry: Option<u32>,
    /// Only events of this tenant; absent for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant_id: Option<String>,
    /// Only events with a JSON payload for which all of these hold, at most 16; absent or empty for all events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<Vec<FilterConditionIn>>,
    /// False if no events are to be matched to it.
    #[serde(default = "yes")]
    pub active: bool,
}

/// A [`SubscriptionIn`] whose every field was checked, except for what only the server can know: if the definition
/// exists, and if the endpoint and the headers may be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewSubscription {
    /// The subscriber.
    pub subscriber_id: String,
    /// The definition of its events.
    pub target: Target,
    /// The address to call.
    pub endpoint: String,
    /// How to call it.
    pub protocol: Protocol,
    /// The assumed type of a payload without content type.
    pub payload_type: PayloadType,
    /// The credentials, if the caller sent any.
    pub auth: Option<AuthIn>,
    /// Headers to add to each request, if the caller sent any.
    pub headers: Option<Headers>,
    /// How long one attempt may take.
    pub timeout: Option<Duration>,
    /// How many attempts may follow the first.
    pub max_retry: Option<u32>,
    /// Only events of this tenant; `None` for all.
    pub tenant_id: Option<String>,
    /// Only events with such a payload.
    pub filter: Filter,
    /// False if no events are to be matched to it.
    pub active: bool,
}

/// How a subscription names its definition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// By id.
    Definition(Uuid),
    /// By key.
    Key(EventKey),
}

/// How an endpoint is called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Protocol {
    /// An HTTP POST.
    #[default]
    #[serde(rename = "HTTP")]
    Http,
}

/// The assumed type of a payload without content type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PayloadType {
    /// JSON.
    #[default]
    #[serde(rename = "PAYLOAD_TYPE_JSON")]
    Json,
    /// Bytes.
    #[serde(rename = "PAYLOAD_TYPE_BINARY")]
    Binary,
}

impl SubscriptionIn {
    /// Checks a subscription that is to be made: its secrets must be there.
    pub fn validate(self) -> Result<NewSubscription, Vec<FieldError>> {
        let mut errors = Errors::default();
        if self.auth.as_ref().is_some_and(AuthIn::keeps_secret) {
            let is_basic = matches!(self.auth, Some(AuthIn::BasicAuth { .. }));
            errors.add(if is_basic { "auth.password" } else { "auth.token" }, "is missing");
        }
        self.checked(errors)
    }

    /// Checks a subscription that replaces another: an absent secret keeps the old one.
    pub fn validate_update(self) -> Result<NewSubscription, Vec<FieldError>> {
        self.checked(Errors::default())
    }

    fn checked(self, mut errors: Errors) -> Result<NewSubscription, Vec<FieldError>> {
        errors.check_name("subscriberId", &self.subscriber_id, MAX_NAME, "");
        if self.endpoint.is_empty() {
            errors.add("endpoint", "is missing: give the address to call, such as https://example.com/hook");
        }
        let target = target(self.definition_id, self.event_key, &mut errors);
        if let Some(auth) = &self.auth {
            auth.check(&mut errors);
        }
        let timeout = self.timeout.and_then(|text| timeout(&text, &mut errors));
        if self.max_retry.is_some_and(|retries| retries > MAX_RETRY) {
            errors.add("maxRetry", format!("is more than {MAX_RETRY}"));
        }
        if let Some(tenant_id) = &self.tenant_id {
            errors.check_name("tenantId", tenant_id, MAX_TEXT, ": leave it out for all tenants");
        }
        let filter = filter::filter(self.filter.unwrap_or_default(), &mut errors);
        errors.none_or(()).map(|()| NewSubscription {
            subscriber_id: self.subscriber_id,
            target,
            endpoint: self.endpoint,
            protocol: self.protocol,
            payload_type: self.payload_type,
            auth: self.auth,
            headers: self.headers,
            timeout,
            max_retry: self.max_retry,
            tenant_id: self.tenant_id,
            filter,
            active: self.active,
        })
    }
}

impl Default for SubscriptionIn {
    /// The meaning of an empty JSON object.
    fn default() -> Self {
        Self {
            subscriber_id: String::new(),
            definition_id: None,
            event_key: None,
            endpoint: String::new(),
            protocol: Protocol::default(),
            payload_type: PayloadType::default(),
            auth: None,
            headers: None,
            timeout: None,
            max_retry: None,
            tenant_id: None,
            filter: None,
            active: true,
        }
    }
}

impl PayloadType {
    /// The content type to declare for a payload that has none of its own.
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::Binary => "application/octet-stream",
        }
    }
}

impl From<PayloadType> for proto::PayloadType {
    fn from(payload_type: PayloadType) -> Self {
        match payload_type {
            PayloadType::Json => Self::Json,
            PayloadType::Binary => Self::Binary,
        }
    }
}

impl From<Protocol> for proto::Protocol {
    fn from(protocol: Protocol) -> Self {
        match protocol {
            Protocol::Http => Self::Http,
        }
    }
}

/// If an error is added, the caller does not use the returned target.
fn target(definition_id: Option<String>, event_key: Option<EventKey>, errors: &mut Errors) -> Target {
    match (definition_id, event_key) {
        (Some(id), None) => Target::Definition(Uuid::parse_str(&id).unwrap_or_else(|_| {
            errors.add("definitionId", "is not a UUID");
            Uuid::nil()
        })),
        (None, Some(key)) => {
            key.check("eventKey.", errors);
            Target::Key(key)
        }
        (None, None) => {
            errors.add("definitionId", "is missing: give the id of a definition, or its eventKey");
            Target::Key(EventKey::default())
        }
        (Some(_), Some(key)) => {
            errors.add("eventKey", "is given beside definitionId: give one of them");
            Target::Key(key)
        }
    }
}

fn timeout(text: &str, errors: &mut Errors) -> Option<Duration> {
    match parse_duration(text) {
        Ok(Duration::ZERO) => errors.add("timeout", "is zero: leave it out for the configured one"),
        Ok(timeout) if timeout > MAX_TIMEOUT => errors.add("timeout", "is more than 60s"),
        Ok(timeout) => return Some(timeout),
        Err(error) => errors.add("timeout", format!("is {error}")),
    }
    None
}

fn yes() -> bool {
    true
}
