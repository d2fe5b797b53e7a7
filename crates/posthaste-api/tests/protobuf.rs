//! The messages of the bus, and their readable form.

use bytes::Bytes;
use chrono::{DateTime, Utc};
use posthaste_api::proto::{
    EventHubEvent, Failure, Header, OutboxEvent, PayloadType, Protocol, datetime, duration, event_hub_event, timestamp,
};
use posthaste_api::readable;
use prost::Message;
use serde_json::{Value, json};

fn time() -> DateTime<Utc> {
    DateTime::from_timestamp(1_900_000_000, 123_456_000).unwrap()
}

fn header(name: &str, value: &str) -> Header {
    Header { name: name.into(), value: value.into() }
}

fn delivery(payload: event_hub_event::Event) -> OutboxEvent {
    OutboxEvent {
        event: Some(EventHubEvent {
            event_id: "evt-1".into(),
            event_type: "order.placed".into(),
            source_service: "shop".into(),
            created_at: Some(timestamp(time())),
            resource_type: Some("order".into()),
            operation_type: None,
            tenant_id: Some(String::new()),
            aggregate_type: Some("Order".into()),
            aggregate_id: Some("42".into()),
            headers: vec![header("z", "1"), header("a", "2"), header("z", "3")],
            content_type: Some("application/json".into()),
            occurred_at: Some(timestamp(time())),
            event: Some(payload),
        }),
        subscription_id: "sub".into(),
        subscriber_id: "crm".into(),
        delivery_id: "dlv".into(),
        endpoint: "https://example.com/hook?token=t0ken&v=1".into(),
        protocol: Protocol::Http.into(),
        sealed_credentials: Bytes::from_static(b"sealed"),
        payload_type: PayloadType::Json.into(),
        domain: "organization".into(),
        timeout: Some(duration(std::time::Duration::from_millis(1_500))),
        max_retry: Some(0),
        headers: vec![header("x-team", "a")],
        failure: Some(Failure {
            code: "503".into(),
            message: "connection refused".into(),
            cause: None,
            attempts: 4,
            first_failed_at: Some(timestamp(time())),
            last_failed_at: Some(timestamp(time())),
            retry_after: Some(posthaste_api::proto::duration(std::time::Duration::from_secs(120))),
            deferred: true,
            permanent: true,
        }),
    }
}

fn json_text(text: &str) -> OutboxEvent {
    delivery(event_hub_event::Event::JsonText(text.into()))
}

#[test]
fn messages_survive_the_wire() {
    let any = prost_types::Any { type_url: "type.googleapis.com/acme.Order".into(), value: vec![1, 2, 3] };
    for payload in [
        event_hub_event::Event::JsonText(" { \"a\" : 1e400 } ".into()),
        event_hub_event::Event::JsonText(String::new()),
        event_hub_event::Event::RawBytes(Bytes::from((0..=u8::MAX).collect::<Vec<_>>())),
        event_hub_event::Event::Any(any),
    ] {
        let sent = delivery(payload);
        assert_eq!(OutboxEvent::decode(Bytes::from(sent.encode_to_vec())).unwrap(), sent);
    }
    let event = EventHubEvent::default();
    assert_eq!((event.tenant_id, event.event), (None, None));
}

#[test]
fn raw_bytes_are_not_copied_when_decoded() {
    let wire = Bytes::from(delivery(event_hub_event::Event::RawBytes(Bytes::from(vec![7; 4_096]))).encode_to_vec());
    let decoded = OutboxEvent::decode(wire.clone()).unwrap();
    let Some(event_hub_event::Event::RawBytes(payload)) = decoded.event.unwrap().event else { panic!("no bytes") };
    assert!(wire.as_ptr_range().contains(&payload.as_ptr()));
}

#[test]
fn times_survive_the_wire() {
    assert_eq!(datetime(&timestamp(time())), Some(time()));
    let leap_second = "2016-12-31T23:59:60.5Z".parse::<DateTime<Utc>>().unwrap();
    assert_eq!(timestamp(leap_second).nanos, 999_999_999);
    let nonsense = prost_types::Timestamp { seconds: i64::MAX, nanos: -1 };
    assert_eq!(datetime(&nonsense), None);
    assert_eq!(duration(std::time::Duration::MAX).seconds, 315_576_000_000);
}

#[test]
fn the_readable_form_shows_everything_but_secrets() {
    let text = readable(&json_text(r#"{"id":1}"#)).to_string();
    for secret in ["sealed", "t0ken", "c2VhbGVk"] {
        assert!(!text.contains(secret), "{text}");
    }
    let value: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        value,
        json!({
            "event": {
                "eventId": "evt-1", "eventType": "order.placed", "sourceService": "shop",
                "createdAt": "2030-03-17T17:46:40.123456Z", "occurredAt": "2030-03-17T17:46:40.123456Z",
                "resourceType": "order", "tenantId": "", "aggregateType": "Order", "aggregateId": "42",
                "headers": { "z": "3", "a": "2" }, "contentType": "application/json", "payload": { "id": 1 },
            },
            "subscriptionId": "sub", "subscriberId": "crm", "deliveryId": "dlv",
            "endpoint": "https://example.com/hook?token=***&v=***", "protocol": "HTTP",
            "payloadType": "PAYLOAD_TYPE_JSON", "domain": "organization", "timeout": "1s 500ms", "maxRetry": 0,
            "headers": { "x-team": "***" },
            "failure": {
                "code": "503", "message": "connection refused", "cause": null, "attempts": 4,
                "firstFailedAt": "2030-03-17T17:46:40.123456Z", "lastFailedAt": "2030-03-17T17:46:40.123456Z",
            },
        })
    );
}

#[test]
fn the_readable_payload_keeps_its_bytes() {
    for payload in ["1e400", r#"{"a":1, "a":2}"#, r#""\ud800""#, "null", "123456789012345678901234567890"] {
        let text = readable(&json_text(payload)).to_string();
        assert!(text.contains(&format!("\"payload\":{payload}}}")), "{text}");
    }
    assert!(readable(&json_text("not json")).get().contains(r#""payloadText":"not json""#));
    let bytes = delivery(event_hub_event::Event::RawBytes(Bytes::from_static(b"\x00\xff\x10")));
    assert!(readable(&bytes).get().contains(r#""payloadBase64":"AP8Q""#));
    let any = prost_types::Any { type_url: "acme.Order".into(), value: vec![0, 255, 16] };
    let any = readable(&delivery(event_hub_event::Event::Any(any))).to_string();
    assert!(any.contains(r#""contentType":"acme.Order","payloadBase64":"AP8Q""#), "{any}");
    assert!(readable(&OutboxEvent::default()).get().contains("\"event\":null"));
}
