//! Builds and reads the messages on the bus. No other module does.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use posthaste_api::proto::{self, EventHubEvent, OutboxEvent, event_hub_event};
use posthaste_api::{Domain, readable, readable_event};
use posthaste_core::bus::{Fetched, Record, route};
use posthaste_core::hub_store::{DeadLetterFields, DeadLetterRow, NewDeadLetter};
use posthaste_core::outbox::OutboxItem;
use posthaste_core::{BusItem, DecodeError, Decoded, Event, FailureClass, GivenUp, Payload};
use posthaste_schema::{SchemaText, framing};
use posthaste_webhook::Endpoint;
use prost::Message;
use prost_types::Timestamp;
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::matching::ActiveSubscription;
use crate::settings::{DeliverySettings, DltSettings};
use crate::topics::TopicNames;

/// The namespace of delivery ids. Each process computes the same id for the same [`id_and_time`] and subscription.
const DELIVERIES: Uuid = Uuid::from_u128(0x6a5f_3c52_1d0e_4b7a_9c41_7be1_05f2_d8a3);

/// The schema of all messages on the bus.
pub(crate) fn schema() -> SchemaText {
    SchemaText { text: posthaste_api::EVENTS_PROTO.to_owned(), references: Vec::new() }
}

/// The full name of the message that a topic of the hub carries.
pub(crate) fn message_name(topics: &TopicNames, topic: &str) -> &'static str {
    match topics.has_events(topic) {
        true => EVENT,
        false => DELIVERY,
    }
}

pub(crate) const EVENT: &str = "posthaste.v1.EventHubEvent";
pub(crate) const DELIVERY: &str = "posthaste.v1.OutboxEvent";

pub(crate) fn event_record(topic: Arc<str>, item: &OutboxItem) -> Record {
    let event = &item.event;
    // Events of one aggregate share a partition. Other events are distributed by their ids.
    let route = match event.aggregate_id() {
        Some(id) => route(&[event.aggregate_type(), id]),
        None => route(&[event.id()]),
    };
    let value = event_message(event, item.created_at).encode_to_vec();
    Record { topic, route, key: event.id().to_owned(), value: value.into(), headers: Vec::new() }
}

fn event_message(event: &Event, created_at: DateTime<Utc>) -> EventHubEvent {
    EventHubEvent {
        event_id: event.id().to_owned(),
        event_type: event.event_type().to_owned(),
        source_service: event.source_service().unwrap_or_default().to_owned(),
        created_at: Some(proto::timestamp(created_at)),
        occurred_at: Some(proto::timestamp(event.occurred_at())),
        resource_type: event.resource_type().map(str::to_owned),
        operation_type: event.operation_type().map(str::to_owned),
        tenant_id: event.tenant_id().map(str::to_owned),
        aggregate_type: Some(event.aggregate_type().to_owned()),
        aggregate_id: event.aggregate_id().map(str::to_owned),
        headers: headers(event.headers()),
        content_type: event.content_type().map(str::to_owned),
        event: Some(match event.payload() {
            Payload::Text(text) => event_hub_event::Event::JsonText(text.clone()),
            Payload::Bytes(bytes) => event_hub_event::Event::RawBytes(bytes.clone()),
        }),
    }
}

pub(crate) fn decode_event(message: Bytes) -> Result<Decoded<EventHubEvent>, DecodeError> {
    let value = EventHubEvent::decode(message)
        .map_err(|error| DecodeError::Poison(format!("not an EventHubEvent: {error}")))?;
    match value.event_id.is_empty() || value.event.is_none() {
        true => Err(DecodeError::Poison("an EventHubEvent without id or payload".to_owned())),
        false => Ok(Decoded { value, budget: None, fair_key: None }),
    }
}

/// The delivery of one event to one subscription.
pub(crate) fn delivery_record(
    topics: &TopicNames,
    domain: Domain,
    event: &EventHubEvent,
    active: &ActiveSubscription,
    defaults: &DeliverySettings,
) -> Record {
    let (id, subscription) = (&active.subscription.id, active.fields());
    let message = OutboxEvent {
        event: Some(event.clone()),
        subscription_id: id.clone(),
        subscriber_id: subscription.subscriber_id.clone(),
        delivery_id: delivery_id(&event.event_id, event.created_at.as_ref(), id).to_string(),
        endpoint: subscription.endpoint.clone(),
        protocol: proto::Protocol::Http.into(),
        sealed_credentials: subscription.credentials_sealed.clone(),
        payload_type: active.payload_type().into(),
        domain: domain.to_string(),
        timeout: Some(proto::duration(subscription.timeout.unwrap_or(defaults.timeout))),
        max_retry: Some(subscription.max_retry.unwrap_or(defaults.max_retry)),
        headers: unvalued_headers(&subscription.header_names),
        failure: None,
    };
    Record {
        topic: topics.outbox(domain),
        // One process delivers all fresh events of a subscription.
        route: route(&[id]),
        key: event.event_id.clone(),
        value: message.encode_to_vec().into(),
        headers: Vec::new(),
    }
}

/// What tells one event from all others: its id, and when its outbox row was created. The id alone is not enough: it
/// may be used again after the row was removed. Another program may publish events without a time.
pub(crate) type IdAndTime = (String, Option<(i64, i32)>);

pub(crate) fn id_and_time(event: &EventHubEvent) -> IdAndTime {
    (event.event_id.clone(), event.created_at.as_ref().map(|at| (at.seconds, at.nanos)))
}

/// The id of the delivery of an event to a subscription. Releases that did not know the time yet computed the ids that
/// events without a time have.
fn delivery_id(event_id: &str, created_at: Option<&Timestamp>, subscription_id: &str) -> Uuid {
    let created_at = created_at.map_or("0".to_owned(), |at| format!("{}.{:09}", at.seconds, at.nanos));
    Uuid::new_v5(&DELIVERIES, format!("{event_id}\n{subscription_id}\n{created_at}").as_bytes())
}

/// True if this is a dead letter of the event with its id whose outbox row was created at this time.
pub(crate) fn is_dead_letter_of(letter: &DeadLetterRow, created_at: DateTime<Utc>) -> bool {
    let DeadLetterFields { event_id, subscription_id, delivery_id: known, .. } = &letter.fields;
    let is = |time: Option<&Timestamp>| *known == delivery_id(event_id, time, subscription_id).to_string();
    is(Some(&proto::timestamp(created_at))) || (is(None) && letter.created_at >= created_at)
}

/// When the outbox row of the event in this record was created; `None` if the record cannot be read.
pub(crate) fn event_created_at(topics: &TopicNames, topic: &str, value: &Bytes) -> Option<DateTime<Utc>> {
    let event = match topics.has_events(topic) {
        true => EventHubEvent::decode(framing::decode(value).ok()?.message).ok(),
        false => delivery_in(value)?.event,
    };
    proto::datetime(event?.created_at.as_ref()?)
}

/// The same for the envelope of a dead letter.
pub(crate) fn created_at_in_dead_letter(envelope: &Bytes) -> Option<DateTime<Utc>> {
    proto::datetime(OutboxEvent::decode(envelope.clone()).ok()?.event?.created_at.as_ref()?)
}

pub(crate) fn decode_delivery(message: Bytes) -> Result<Decoded<OutboxEvent>, DecodeError> {
    let value =
        OutboxEvent::decode(message).map_err(|error| DecodeError::Poison(format!("not an OutboxEvent: {error}")))?;
    if value.event.is_none() || value.subscription_id.is_empty() {
        return Err(DecodeError::Poison("an OutboxEvent without event or subscription".to_owned()));
    }
    let budget = value.max_retry.map(|retries| retries.saturating_add(1));
    let fair_key = Some(value.subscription_id.as_str().into());
    Ok(Decoded { value, budget, fair_key })
}

/// Decodes a record of a dead-letter topic. Its intake is retried for ever, so the attempts of its delivery do not
/// matter here.
pub(crate) fn decode_dead_letter(message: Bytes) -> Result<Decoded<OutboxEvent>, DecodeError> {
    decode_delivery(message).map(|decoded| Decoded { budget: None, ..decoded })
}

/// The record that dead-letters a delivery.
pub(crate) fn dead_letter(topics: &TopicNames, item: &BusItem<OutboxEvent>, given_up: &GivenUp) -> Record {
    let mut message = (*item.value).clone();
    let now = Utc::now();
    let failure = &given_up.failure;
    message.failure = Some(proto::Failure {
        code: failure.code.to_string(),
        message: failure.message.clone(),
        cause: failure.cause.clone(),
        attempts: given_up.attempts,
        first_failed_at: Some(proto::timestamp(item.first_failed_at.unwrap_or(now))),
        last_failed_at: Some(proto::timestamp(now)),
        retry_after: failure.retry_after.map(proto::duration),
        deferred: given_up.is_deferred,
        permanent: failure.class == FailureClass::Permanent,
    });
    let domain = message.domain.parse().unwrap_or(Domain::Organization);
    Record {
        topic: topics.dlt(domain),
        route: route(&[&message.subscription_id]),
        key: message.event.as_ref().map(|event| event.event_id.clone()).unwrap_or_default(),
        value: message.encode_to_vec().into(),
        headers: Vec::new(),
    }
}

/// The value of a record, for people.
pub(crate) struct ReadableValue {
    /// The schema that the value names.
    pub(crate) schema_id: Option<i32>,
    /// The message as JSON, without secrets, or why it cannot be decoded.
    pub(crate) value: Result<Box<RawValue>, String>,
}

/// Decodes the value of a record by the kind of its topic.
pub(crate) fn readable_value(topics: &TopicNames, record: &Fetched) -> ReadableValue {
    let topic = &*record.position.topic;
    let frame = match &record.damage {
        Some(damage) => Err(damage.clone()),
        None => framing::decode(&record.value).map_err(|error| error.to_string()),
    };
    let schema_id = frame.as_ref().ok().map(|frame| frame.schema_id);
    let value = frame.and_then(|frame| match topics.has_events(topic) {
        true => EventHubEvent::decode(frame.message)
            .map(|event| readable_event(&event))
            .map_err(|error| format!("not an EventHubEvent: {error}")),
        false if topics.has_deliveries(topic) => OutboxEvent::decode(frame.message)
            .map(|delivery| readable(&delivery))
            .map_err(|error| format!("not an OutboxEvent: {error}")),
        false => Err("the topic is none of this server: the type of its messages is not known".to_owned()),
    });
    ReadableValue { schema_id, value }
}

/// The delivery in the value of a record of an outbox topic or a dead-letter topic; `None` if it cannot be read.
pub(crate) fn delivery_in(value: &Bytes) -> Option<OutboxEvent> {
    OutboxEvent::decode(framing::decode(value).ok()?.message).ok()
}

/// The dead letter of a record of a dead-letter topic. Its first retry is due after the configured interval, or after
/// the time that the endpoint requested. A delivery that failed permanently is not scheduled. If no retries are configured,
/// only a deferred delivery is scheduled, because its attempts are not spent.
pub(crate) fn new_dead_letter(message: &OutboxEvent, settings: &DltSettings) -> NewDeadLetter {
    let event = message.event.clone().unwrap_or_default();
    let failure = message.failure.clone().unwrap_or_default();
    let requested = failure.retry_after.and_then(|wait| Duration::try_from(wait).ok()).unwrap_or_default();
    NewDeadLetter {
        fields: DeadLetterFields {
            delivery_id: message.delivery_id.clone(),
            event_id: event.event_id,
            subscription_id: message.subscription_id.clone(),
            subscriber_id: message.subscriber_id.clone(),
            event_type: event.event_type,
            domain: message.domain.clone(),
            // Without the query string, which may be a token. The envelope has the whole URL.
            endpoint: Endpoint::parse(&message.endpoint).map(|endpoint| endpoint.to_string()).unwrap_or_default(),
            attempts: failure.attempts,
            first_failed_at: failure.first_failed_at.as_ref().and_then(proto::datetime).unwrap_or_else(Utc::now),
        },
        envelope: Bytes::from(message.encode_to_vec()),
        readable: readable(message).get().to_owned(),
        error: failure.message,
        error_code: failure.code,
        error_cause: failure.cause,
        is_deferred: failure.deferred,
        is_permanent: failure.permanent,
        first_delay: match failure.attempts {
            _ if failure.permanent => None,
            // Its first request is not a retry. It is made as soon as its lane has room.
            0 => Some(requested),
            _ => (failure.deferred || settings.max_retry > 0).then(|| settings.retry_interval.max(requested)),
        },
    }
}

fn unvalued_headers(names: &[String]) -> Vec<proto::Header> {
    names.iter().map(|name| proto::Header { name: name.clone(), value: String::new() }).collect()
}

fn headers(headers: &[(String, String)]) -> Vec<proto::Header> {
    headers.iter().map(|(name, value)| proto::Header { name: name.clone(), value: value.clone() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delivery_id_is_of_one_row_and_one_subscription() {
        let at = |seconds, nanos| Timestamp { seconds, nanos };
        let id = delivery_id("event", Some(&at(1, 5)), "subscription");
        assert_eq!(id, delivery_id("event", Some(&at(1, 5)), "subscription"), "published again after a crash");
        for other in [
            delivery_id("event", Some(&at(1, 6)), "subscription"),
            delivery_id("event", Some(&at(0, 0)), "subscription"),
            delivery_id("event", None, "subscription"),
            delivery_id("event", Some(&at(1, 5)), "another"),
            delivery_id("another", Some(&at(1, 5)), "subscription"),
        ] {
            assert_ne!(id, other);
        }
    }

    /// Other processes compute these ids, too, perhaps of another release.
    #[test]
    fn delivery_ids_do_not_change() {
        let created_at = Timestamp { seconds: 1_750_000_000, nanos: 123_000_000 };
        let ids = [Some(&created_at), None].map(|at| delivery_id("event", at, "subscription").to_string());
        assert_eq!(ids, ["67e95213-9833-58bb-87c8-8b57c4ab669f", "6164b489-ca07-5bb8-ad32-bb7a20b20f62"]);
    }
}
