use std::fmt;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use chrono::{DateTime, Datelike, Utc};
use posthaste_core::{Event, EventError, MAX_EVENT_ID, MAX_HEADERS, MAX_PAYLOAD};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use crate::checks::Errors;
use crate::duration::parse_duration;
use crate::headers::Headers;
use crate::input::Input;
use crate::problem::FieldError;

/// The longest event type and the longest name of a source service, in characters.
pub const MAX_NAME: usize = 128;

/// The longest of the other texts of an event, in characters.
pub(crate) const MAX_TEXT: usize = 255;

/// The longest delay of an event: no clock of a database overflows when it is added.
pub const MAX_DELAY: Duration = Duration::from_secs(3_650 * 24 * 3_600);

/// An event as a caller publishes it.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EventIn {
    /// The caller's own id; publishing the same one again stores nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event_id: Option<String>,
    /// The type of the event: required, `[A-Za-z0-9._-]{1,128}`, because it becomes the name of a topic.
    #[serde(default)]
    pub event_type: String,
    /// The service that publishes it: required.
    #[serde(default)]
    pub source_service: String,
    /// The type of the resource that the event is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_type: Option<String>,
    /// The operation on the resource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation_type: Option<String>,
    /// The tenant of the event, passed through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant_id: Option<String>,
    /// The kind of the aggregate whose events keep their order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aggregate_type: Option<String>,
    /// The aggregate whose events keep their order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aggregate_id: Option<String>,
    /// Sent on to subscribers as `posthaste-header-<name>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers: Option<Headers>,
    /// When it happened (RFC 3339). Default: now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub occurred_at: Option<String>,
    /// When it may be delivered (RFC 3339).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub available_at: Option<String>,
    /// How long to wait before it may be delivered, instead of `availableAt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deliver_after: Option<String>,
    /// Any JSON value, `null` included: delivered byte for byte as it is given here.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "even_null")]
    pub payload: Option<Box<RawValue>>,
    /// Bytes of any kind, instead of `payload`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payload_base64: Option<String>,
    /// The content type of the payload. Default: the subscription's payload type decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
}

/// Serde reads `null` in an optional field as absent, but `null` is a payload.
fn even_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Box<RawValue>>, D::Error> {
    Box::<RawValue>::deserialize(deserializer).map(Some)
}

impl EventIn {
    /// The event that this describes, or everything that is wrong with it.
    pub fn validate(self) -> Result<Event, Vec<FieldError>> {
        let mut errors = Errors::default();
        self.check_names(&mut errors);
        let headers = self.headers.map(|headers| headers.0).unwrap_or_default();
        check_headers(&headers, &mut errors);
        let occurred_at = self.occurred_at.and_then(|text| time("occurredAt", &text, &mut errors));
        let both_delays = self.available_at.is_some() && self.deliver_after.is_some();
        let available_at = self.available_at.and_then(|text| time("availableAt", &text, &mut errors));
        let deliver_after = self.deliver_after.and_then(|text| delay(&text, &mut errors));
        if both_delays {
            errors.add("deliverAfter", "is given beside availableAt: give one of them");
        } else if let (Some(available_at), Some(occurred_at)) = (available_at, occurred_at)
            && available_at < occurred_at
        {
            errors.add("availableAt", "is before occurredAt");
        }
        if self.content_type.as_deref().is_some_and(|text| !is_content_type(text)) {
            errors.add("contentType", "is not a media type, such as application/json");
        }
        let payload = payload(self.payload, self.payload_base64, &mut errors);
        let (text, bytes) = errors.none_or(payload)?;
        let mut builder = Event::builder(self.event_type)
            .id(self.event_id)
            .source_service(self.source_service)
            .resource_type(self.resource_type)
            .operation_type(self.operation_type)
            .tenant_id(self.tenant_id)
            .aggregate_id(self.aggregate_id)
            .headers(headers)
            .content_type(self.content_type)
            .occurred_at(occurred_at)
            .available_at(available_at)
            .deliver_after(deliver_after)
            .text(text)
            .bytes(bytes);
        if let Some(aggregate_type) = self.aggregate_type {
            builder = builder.aggregate_type(aggregate_type);
        }
        builder.build().map_err(|error| vec![FieldError::new(field_of(&error), error.to_string())])
    }

    fn check_names(&self, errors: &mut Errors) {
        if !is_event_type(&self.event_type) {
            errors.add(
                "eventType",
                match self.event_type.is_empty() {
                    true => "is missing: give every event a type, such as order.placed",
                    false => "is not 1 to 128 characters of A-Z a-z 0-9 . _ -",
                },
            );
        }
        if self.source_service.is_empty() {
            errors.add("sourceService", "is missing: say which service publishes the event");
        } else {
            errors.check_name("sourceService", &self.source_service, MAX_NAME, "");
        }
        if self.event_id.as_deref().is_some_and(|id| !is_event_id(id)) {
            errors.add("eventId", format!("is not 1 to {MAX_EVENT_ID} characters of A-Z a-z 0-9 . _ : -"));
        }
        for (field, text) in [
            ("resourceType", &self.resource_type),
            ("operationType", &self.operation_type),
            ("tenantId", &self.tenant_id),
            ("aggregateType", &self.aggregate_type),
            ("aggregateId", &self.aggregate_id),
        ] {
            if let Some(text) = text {
                errors.check_name(field, text, MAX_TEXT, ": leave it out if there is none");
            }
        }
    }
}

impl Input for EventIn {
    type Checked = Event;

    const EITHER: &[&[&str]] = &[&["payload", "payloadBase64"], &["availableAt", "deliverAfter"]];
    const ARRAY: &str = "the body is an array: send one event here, or the array to POST /api/events/batch";

    fn validate(self) -> Result<Event, Vec<FieldError>> {
        EventIn::validate(self)
    }
}

impl fmt::Debug for EventIn {
    /// Prints the fields that help to find the event, never the payload.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventIn")
            .field("event_id", &self.event_id)
            .field("event_type", &self.event_type)
            .field("source_service", &self.source_service)
            .finish_non_exhaustive()
    }
}

/// True if a text can be an event type of the hub, and so part of a topic's name: `[A-Za-z0-9._-]{1,128}`.
pub fn is_event_type(text: &str) -> bool {
    is_name(text, MAX_NAME, b"._-")
}

/// True if a text can be an event id: `[A-Za-z0-9._:-]{1,128}`.
pub fn is_event_id(text: &str) -> bool {
    is_name(text, MAX_EVENT_ID, b"._:-")
}

fn is_name(text: &str, longest: usize, punctuation: &[u8]) -> bool {
    (1..=longest).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || punctuation.contains(&byte))
}

fn is_content_type(text: &str) -> bool {
    let is_visible = text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
    let mut parts = text.split(';').next().unwrap_or_default().trim_end().splitn(2, '/');
    let is_token = |part: Option<&str>| part.is_some_and(|part| !part.is_empty() && !part.contains([' ', '/']));
    text.len() <= MAX_TEXT && is_visible && is_token(parts.next()) && is_token(parts.next())
}

fn check_headers(headers: &[(String, String)], errors: &mut Errors) {
    if headers.iter().any(|(name, _)| name.is_empty()) {
        errors.add("headers", "has an empty name: name every header");
    }
    if headers.iter().any(|(name, _)| name.contains(char::is_control)) {
        errors.add("headers", "has a name with a control character: remove it");
    }
    if let Some((name, _)) = headers.iter().find(|(_, value)| value.contains('\0')) {
        errors.add("headers", format!("has a NUL character in the value of {name:?}: move bytes into the payload"));
    }
    let size: usize = headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    if size > MAX_HEADERS {
        errors.add("headers", format!("has {size} bytes, more than {MAX_HEADERS}: move data into the payload"));
    }
}

fn time(field: &str, text: &str, errors: &mut Errors) -> Option<DateTime<Utc>> {
    let time = DateTime::parse_from_rfc3339(text).ok().map(|time| time.with_timezone(&Utc));
    // An offset can push the first and the last day out of the years that four digits can write.
    let time = time.filter(|time| (1..=9_999).contains(&time.year()));
    if time.is_none() {
        errors.add(field, "is not a time in RFC 3339, such as 2030-01-31T12:00:00Z");
    }
    time
}

fn delay(text: &str, errors: &mut Errors) -> Option<Duration> {
    match parse_duration(text) {
        Ok(Duration::ZERO) => errors.add("deliverAfter", "is zero: leave it out to deliver at once"),
        Ok(delay) if delay > MAX_DELAY => errors.add("deliverAfter", "is more than ten years"),
        Ok(delay) => return Some(delay),
        Err(error) => errors.add("deliverAfter", format!("is {error}")),
    }
    None
}

type TextOrBytes = (Option<String>, Option<Bytes>);

fn payload(json: Option<Box<RawValue>>, base64: Option<String>, errors: &mut Errors) -> TextOrBytes {
    let (text, bytes) = match (json, base64) {
        (Some(json), None) => (Some(String::from(Box::<str>::from(json))), None),
        (None, Some(base64)) => match STANDARD.decode(base64) {
            Ok(bytes) => (None, Some(Bytes::from(bytes))),
            Err(error) => {
                errors.add("payloadBase64", format!("is not base64 (RFC 4648, padded): {error}"));
                return (None, None);
            }
        },
        (None, None) => {
            errors.add("payload", "is missing: give any JSON value, or bytes in payloadBase64");
            return (None, None);
        }
        (Some(_), Some(_)) => {
            errors.add("payloadBase64", "is given beside payload: give one of them");
            return (None, None);
        }
    };
    let size = text.as_ref().map_or(0, String::len) + bytes.as_ref().map_or(0, Bytes::len);
    if size > MAX_PAYLOAD {
        let field = if text.is_some() { "payload" } else { "payloadBase64" };
        let detail = format!("has {size} bytes, more than {MAX_PAYLOAD}: store it elsewhere and send a reference");
        errors.add(field, detail);
    }
    (text, bytes)
}

/// The field that an error of the core is about, in case its rules are stricter than those here.
fn field_of(error: &EventError) -> &'static str {
    match error {
        EventError::EmptyType => "eventType",
        EventError::HeadersTooLarge(_) | EventError::EmptyHeaderName => "headers",
        EventError::BadId(_) => "eventId",
        EventError::TwoDelays | EventError::ZeroDelay => "deliverAfter",
        EventError::AvailableBeforeOccurred { .. } => "availableAt",
        EventError::TooLong { field, .. } | EventError::Nul { field } => match *field {
            "event_type" => "eventType",
            "aggregate_type" => "aggregateType",
            "aggregate_id" => "aggregateId",
            "tenant_id" => "tenantId",
            "source_service" => "sourceService",
            "resource_type" => "resourceType",
            "operation_type" => "operationType",
            _ => "contentType",
        },
        _ => "payload",
    }
}
