use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::duration::format_duration;
use crate::headers::Headers;
use crate::mask::{MASK, masked_endpoint};
use crate::proto::{self, EventHubEvent, OutboxEvent, event_hub_event};

/// A delivery as JSON for people, for dead letters and for looking into topics.
///
/// A JSON payload is in `payload` with its own bytes, other text in `payloadText`, and bytes in `payloadBase64`. The
/// sealed credentials are left out, and so are the values of the endpoint's query string and of the subscription's own
/// headers, which may be tokens.
pub fn readable(delivery: &OutboxEvent) -> Box<RawValue> {
    let readable = ReadableDelivery {
        event: delivery.event.as_ref().map(ReadableEvent::of),
        subscription_id: &delivery.subscription_id,
        subscriber_id: &delivery.subscriber_id,
        delivery_id: &delivery.delivery_id,
        endpoint: masked_endpoint(&delivery.endpoint),
        protocol: match delivery.protocol() {
            proto::Protocol::Http => "HTTP",
            proto::Protocol::Unspecified => "UNSPECIFIED",
        },
        payload_type: delivery.payload_type().as_str_name(),
        domain: &delivery.domain,
        timeout: delivery.timeout.and_then(|timeout| timeout.try_into().ok()).map(format_duration),
        max_retry: delivery.max_retry,
        headers: Headers(delivery.headers.iter().map(|header| (header.name.clone(), MASK.to_owned())).collect()),
        failure: delivery.failure.as_ref().map(|failure| ReadableFailure {
            code: &failure.code,
            message: &failure.message,
            cause: failure.cause.as_deref(),
            attempts: failure.attempts,
            first_failed_at: time(&failure.first_failed_at),
            last_failed_at: time(&failure.last_failed_at),
        }),
    };
    // Texts, numbers and maps with text keys: nothing here can fail to be JSON.
    serde_json::value::to_raw_value(&readable).expect("a readable delivery is JSON")
}

/// An event as JSON for people, with the fields of [`readable`].
pub fn readable_event(event: &EventHubEvent) -> Box<RawValue> {
    serde_json::value::to_raw_value(&ReadableEvent::of(event)).expect("a readable event is JSON")
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReadableDelivery<'a> {
    event: Option<ReadableEvent<'a>>,
    subscription_id: &'a str,
    subscriber_id: &'a str,
    delivery_id: &'a str,
    endpoint: String,
    protocol: &'static str,
    payload_type: &'static str,
    domain: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_retry: Option<u32>,
    #[serde(skip_serializing_if = "Headers::is_empty")]
    headers: Headers,
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<ReadableFailure<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReadableEvent<'a> {
    event_id: &'a str,
    event_type: &'a str,
    source_service: &'a str,
    created_at: Option<DateTime<Utc>>,
    occurred_at: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    resource_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    operation_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aggregate_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aggregate_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Headers::is_empty")]
    headers: Headers,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_type: Option<&'a str>,
    #[serde(flatten)]
    payload: Option<ReadablePayload<'a>>,
}

#[derive(Serialize)]
enum ReadablePayload<'a> {
    #[serde(rename = "payload")]
    Json(&'a RawValue),
    #[serde(rename = "payloadText")]
    Text(&'a str),
    #[serde(rename = "payloadBase64")]
    Bytes(String),
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReadableFailure<'a> {
    code: &'a str,
    message: &'a str,
    cause: Option<&'a str>,
    attempts: u32,
    first_failed_at: Option<DateTime<Utc>>,
    last_failed_at: Option<DateTime<Utc>>,
}

impl<'a> ReadableEvent<'a> {
    fn of(event: &'a EventHubEvent) -> Self {
        Self {
            event_id: &event.event_id,
            event_type: &event.event_type,
            source_service: &event.source_service,
            created_at: time(&event.created_at),
            occurred_at: time(&event.occurred_at),
            resource_type: event.resource_type.as_deref(),
            operation_type: event.operation_type.as_deref(),
            tenant_id: event.tenant_id.as_deref(),
            aggregate_type: event.aggregate_type.as_deref(),
            aggregate_id: event.aggregate_id.as_deref(),
            headers: headers(&event.headers),
            content_type: match &event.event {
                // The name of the message type is more precise than any content type.
                Some(event_hub_event::Event::Any(any)) => Some(&any.type_url),
                _ => event.content_type.as_deref(),
            },
            payload: event.event.as_ref().map(ReadablePayload::of),
        }
    }
}

impl<'a> ReadablePayload<'a> {
    fn of(payload: &'a event_hub_event::Event) -> Self {
        match payload {
            event_hub_event::Event::JsonText(text) => match serde_json::from_str(text) {
                Ok(json) => Self::Json(json),
                Err(_) => Self::Text(text),
            },
            event_hub_event::Event::RawBytes(bytes) => Self::Bytes(STANDARD.encode(bytes)),
            event_hub_event::Event::Any(any) => Self::Bytes(STANDARD.encode(&any.value)),
        }
    }
}

fn headers(headers: &[proto::Header]) -> Headers {
    Headers(headers.iter().cloned().map(Into::into).collect())
}

fn time(timestamp: &Option<prost_types::Timestamp>) -> Option<DateTime<Utc>> {
    timestamp.as_ref().and_then(proto::datetime)
}
