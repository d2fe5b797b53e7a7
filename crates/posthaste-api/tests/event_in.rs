//! Which events may be published, and the errors for all others.

use posthaste_api::{EventIn, FieldError, suggest};
use posthaste_core::{Delay, Event, GLOBAL_AGGREGATE, MAX_HEADERS, MAX_PAYLOAD, Payload};
use proptest::prelude::*;
use serde_json::{Value, json};

fn parse(text: &str) -> EventIn {
    serde_json::from_str(text).unwrap()
}

/// A valid event with the fields of `changes` instead of or beside its own.
fn with(changes: Value) -> Result<Event, Vec<FieldError>> {
    let mut event = json!({ "eventType": "order.placed", "sourceService": "shop" });
    if changes.get("payloadBase64").is_none() {
        event["payload"] = json!({ "id": 1 });
    }
    for (name, value) in changes.as_object().unwrap() {
        event[name] = value.clone();
    }
    parse(&event.to_string()).validate()
}

fn refused(changes: Value) -> Vec<String> {
    with(changes).unwrap_err().into_iter().map(|error| error.field).collect()
}

#[test]
fn the_payload_is_kept_byte_for_byte() {
    for payload in [
        "{\"id\":1}",
        "{ \"a\" :\n\t[ 1 , 2 ]  }",
        "1e400",
        "-0.0000000000000000000000000000000000001E-999",
        "123456789012345678901234567890",
        "1.0",
        r#"{"a":1,"a":2,"b":{"a":3,"a":4}}"#,
        r#""\u00e9\ud83d\ude00\ud800\/""#,
        "\"é😀\u{7f}\"",
        "null",
        "true",
        "[]",
        "\"\"",
        "  \r\n {\"padded\": true} \t ",
    ] {
        let body = format!("{{\"eventType\":\"t\",\"payload\":{payload},\"sourceService\":\"s\"}}");
        let event = parse(&body).validate().unwrap();
        // White space around the value belongs to the request, white space inside belongs to the value.
        assert_eq!(event.payload(), &Payload::Text(payload.trim_ascii().to_owned()));
        assert_eq!(event.content_type(), None);
        let batch: Vec<EventIn> = serde_json::from_str(&format!("[{body}, {body}]")).unwrap();
        assert_eq!(batch[1].clone().validate().unwrap().payload(), event.payload());
        let sent_by_cli = serde_json::to_string(&batch[0]).unwrap();
        assert_eq!(parse(&sent_by_cli).validate().unwrap().payload(), event.payload());
    }
}

#[test]
fn deep_payloads_do_not_overflow() {
    let payload = "[".repeat(100_000) + &"]".repeat(100_000);
    let event = parse(&format!(r#"{{"eventType":"t","sourceService":"s","payload":{payload}}}"#));
    assert_eq!(event.validate().unwrap().payload().as_bytes(), payload.as_bytes());
}

#[test]
fn bytes_are_given_as_base64() {
    let event = with(json!({ "payloadBase64": "AP8Q", "contentType": "image/png" })).unwrap();
    assert_eq!(event.payload().as_bytes(), [0, 255, 16]);
    assert!(matches!(event.payload(), Payload::Bytes(_)));
    assert_eq!(event.content_type(), Some("image/png"));
    assert!(with(json!({ "payloadBase64": "" })).unwrap().payload().as_bytes().is_empty());
    assert_eq!(refused(json!({ "payloadBase64": "AP8" })), ["payloadBase64"]);
    assert_eq!(refused(json!({ "payloadBase64": "not base64!" })), ["payloadBase64"]);
    assert_eq!(refused(json!({ "payloadBase64": "", "payload": null })), ["payloadBase64"]);
}

#[test]
fn every_field_reaches_the_event() {
    let event = with(json!({
        "eventId": "evt:1", "resourceType": "order", "operationType": "CREATE", "tenantId": "acme",
        "aggregateType": "Order", "aggregateId": "42", "headers": { "z": "1", "a": "" },
        "occurredAt": "2030-01-31T13:00:00.5+01:00", "deliverAfter": "1m 30s", "contentType": "application/json",
    }))
    .unwrap();
    assert_eq!((event.id(), event.event_type(), event.source_service()), ("evt:1", "order.placed", Some("shop")));
    assert_eq!((event.resource_type(), event.operation_type()), (Some("order"), Some("CREATE")));
    assert_eq!((event.aggregate_type(), event.aggregate_id()), ("Order", Some("42")));
    assert_eq!((event.tenant_id(), event.content_type()), (Some("acme"), Some("application/json")));
    assert_eq!(event.headers(), [("a".into(), String::new()), ("z".into(), "1".into())]);
    assert_eq!(event.occurred_at().to_rfc3339(), "2030-01-31T12:00:00.500+00:00");
    assert_eq!(event.delay(), Delay::For(std::time::Duration::from_secs(90)));
    let plain = with(json!({ "eventId": null, "headers": null, "tenantId": null, "availableAt": null })).unwrap();
    assert_eq!((plain.id().len(), plain.aggregate_type(), plain.tenant_id()), (26, GLOBAL_AGGREGATE, None));
}

#[test]
fn headers_keep_their_order_and_repetitions() {
    let event = parse(r#"{"eventType":"t","sourceService":"s","payload":1,"headers":{"z":"1","a":"2","z":"3"}}"#);
    let headers = [("z", "1"), ("a", "2"), ("z", "3")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(event.validate().unwrap().headers(), headers);
}

#[test]
fn every_rule_is_enforced() {
    for (changes, field) in [
        (json!({ "eventType": "" }), "eventType"),
        (json!({ "eventType": "order placed" }), "eventType"),
        (json!({ "eventType": "order/placed" }), "eventType"),
        (json!({ "eventType": "bestellt-ü" }), "eventType"),
        (json!({ "eventType": "x".repeat(129) }), "eventType"),
        (json!({ "sourceService": "" }), "sourceService"),
        (json!({ "sourceService": "é".repeat(129) }), "sourceService"),
        (json!({ "eventId": "" }), "eventId"),
        (json!({ "eventId": "a b" }), "eventId"),
        (json!({ "eventId": "x".repeat(129) }), "eventId"),
        (json!({ "resourceType": "" }), "resourceType"),
        (json!({ "operationType": "x".repeat(256) }), "operationType"),
        (json!({ "tenantId": "" }), "tenantId"),
        (json!({ "aggregateType": "" }), "aggregateType"),
        (json!({ "aggregateId": "x".repeat(256) }), "aggregateId"),
        (json!({ "headers": { "": "x" } }), "headers"),
        (json!({ "headers": { "h": "x".repeat(MAX_HEADERS) } }), "headers"),
        (json!({ "occurredAt": "yesterday" }), "occurredAt"),
        (json!({ "occurredAt": "2030-01-31" }), "occurredAt"),
        (json!({ "occurredAt": "0000-01-01T00:00:00Z" }), "occurredAt"),
        (json!({ "availableAt": "2030-02-31T00:00:00Z" }), "availableAt"),
        (json!({ "occurredAt": "2030-01-02T00:00:00Z", "availableAt": "2030-01-01T00:00:00Z" }), "availableAt"),
        (json!({ "availableAt": "2030-01-01T00:00:00Z", "deliverAfter": "5s" }), "deliverAfter"),
        (json!({ "deliverAfter": "soon" }), "deliverAfter"),
        (json!({ "deliverAfter": "5" }), "deliverAfter"),
        (json!({ "deliverAfter": "0s" }), "deliverAfter"),
        (json!({ "deliverAfter": "11years" }), "deliverAfter"),
        (json!({ "deliverAfter": "999999999999999999999999s" }), "deliverAfter"),
        (json!({ "contentType": "json" }), "contentType"),
        (json!({ "contentType": "a/b\r\nx: y" }), "contentType"),
        (json!({ "payload": "x".repeat(MAX_PAYLOAD - 1) }), "payload"),
    ] {
        let shown: String = changes.to_string().chars().take(80).collect();
        assert_eq!(refused(changes), [field], "{shown}");
    }
    for allowed in [
        json!({ "eventType": "A.b_c-9" }),
        json!({ "eventType": "x".repeat(128) }),
        json!({ "sourceService": "é".repeat(128) }),
        json!({ "contentType": "application/vnd.acme+json; charset=utf-8" }),
        json!({ "payload": "x".repeat(MAX_PAYLOAD - 2) }),
        json!({ "occurredAt": "2016-12-31T23:59:60Z" }),
    ] {
        assert!(with(allowed).is_ok());
    }
}

#[test]
fn all_violations_are_reported_at_once() {
    let event = parse(r#"{"eventId":"?","occurredAt":"x","deliverAfter":"y","contentType":"z","tenantId":""}"#);
    let fields: Vec<String> = event.validate().unwrap_err().into_iter().map(|error| error.field).collect();
    let expected = ["eventType", "sourceService", "eventId", "tenantId", "occurredAt", "deliverAfter", "contentType"];
    assert_eq!(fields[..7], expected);
    assert_eq!(fields[7..], ["payload"]);
}

#[test]
fn unknown_fields_are_refused_with_a_suggestion() {
    let explained = |text: &str| suggest::explain(&serde_json::from_str::<EventIn>(text).unwrap_err().to_string());
    assert!(explained(r#"{"event_type":"x"}"#).starts_with(r#"unknown field "event_type"; did you mean "eventType"?"#));
    assert!(explained(r#"{"paylod":1}"#).contains(r#"did you mean "payload"?"#));
    assert!(explained(r#"{"colour":1}"#).contains("known: eventId, eventType, sourceService"));
}

#[test]
fn debug_does_not_show_the_payload() {
    let event = parse(r#"{"eventType":"t","sourceService":"s","payload":"s3cret"}"#);
    assert!(!format!("{event:?}").contains("s3cret"));
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC{0,80}") {
        if let Ok(event) = serde_json::from_str::<EventIn>(&text) {
            let _ = event.validate();
        }
    }

    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
        if let Ok(event) = serde_json::from_slice::<EventIn>(&bytes) {
            let _ = event.validate();
        }
    }

    #[test]
    fn no_field_panics(
        field in prop::sample::select(vec![
            "eventId", "eventType", "sourceService", "resourceType", "occurredAt", "availableAt", "deliverAfter",
            "payload", "payloadBase64", "contentType", "tenantId", "aggregateId",
        ]),
        value in "(\\PC{0,40}|[0-9]{1,25}(ns|ms|s|m|h|y)|[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(Z|[+-][0-9]{2}:[0-9]{2}))",
    ) {
        if let Err(errors) = with(json!({ field: value })) {
            prop_assert!(!errors.is_empty());
        }
    }
}
