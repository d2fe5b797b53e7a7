//! A: the event before it is written.

use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, TimeDelta, Utc};
use posthaste::{Delay, Event, EventBuilder, EventError, GLOBAL_AGGREGATE, Listeners, MAX_PAYLOAD, Payload};

fn minimal() -> EventBuilder {
    Event::builder("order.placed").text("{}".to_owned())
}

fn noon() -> DateTime<Utc> {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

#[test]
fn a1_only_type_and_payload_are_required() {
    let before = Utc::now();
    let event = minimal().build().unwrap();
    assert!((before..=Utc::now()).contains(&event.occurred_at()));
    assert_eq!(event.aggregate_type(), GLOBAL_AGGREGATE);
    assert_eq!((event.aggregate_id(), event.tenant_id(), event.delay()), (None, None, Delay::None));
    assert!(event.headers().is_empty());
    let ids: Vec<String> = (0..1_000).map(|_| minimal().build().unwrap().id().to_owned()).collect();
    let is_ulid = |id: &String| id.len() == 26 && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
    assert!(ids.iter().all(is_ulid));
    assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "ids are in increasing order");
}

#[test]
fn a2_the_caller_can_set_every_field() {
    let later = noon() + TimeDelta::hours(1);
    let event = Event::builder("order.placed")
        .id("my-id".to_owned())
        .aggregate("order", 7)
        .tenant_id("acme".to_owned())
        .source_service("shop".to_owned())
        .resource_type("order".to_owned())
        .operation_type("create".to_owned())
        .content_type("application/json".to_owned())
        .header("b", "2")
        .header("a", "1")
        .text("{\"id\": 7}".to_owned())
        .occurred_at(noon())
        .available_at(later)
        .build()
        .unwrap();
    assert_eq!((event.id(), event.event_type()), ("my-id", "order.placed"));
    assert_eq!((event.aggregate_type(), event.aggregate_id()), ("order", Some("7")));
    assert_eq!((event.tenant_id(), event.source_service()), (Some("acme"), Some("shop")));
    assert_eq!((event.resource_type(), event.operation_type()), (Some("order"), Some("create")));
    assert_eq!(event.content_type(), Some("application/json"));
    assert_eq!(event.headers(), [("b".to_owned(), "2".to_owned()), ("a".to_owned(), "1".to_owned())]);
    assert_eq!(event.payload(), &Payload::Text("{\"id\": 7}".to_owned()));
    assert_eq!((event.occurred_at(), event.delay()), (noon(), Delay::Until(later)));
}

#[test]
fn a3_the_short_forms_equal_the_builder() {
    let short = Event::text("t", "{}").id("1".to_owned()).occurred_at(noon()).build().unwrap();
    let long = Event::builder("t").text("{}".to_owned()).id("1".to_owned()).occurred_at(noon()).build().unwrap();
    assert!(short == long);
    let json = Event::json("t", &serde_json::json!({})).unwrap().id("1".to_owned()).occurred_at(noon());
    assert!(json.build().unwrap() == long);
}

#[test]
fn a4_an_event_needs_exactly_one_payload() {
    let text = Event::text("t", "é").build().unwrap();
    assert_eq!(text.payload().as_bytes(), "é".as_bytes());
    let bytes = Event::builder("t").bytes(Bytes::from("é")).build().unwrap();
    assert_eq!(std::str::from_utf8(bytes.payload().as_bytes()), Ok("é"));
    assert_eq!(bytes.payload().clone().into_bytes(), text.payload().clone().into_bytes());
    assert_eq!(Event::builder("t").build().unwrap_err(), EventError::NoPayload);
    assert_eq!(minimal().bytes(Bytes::from("x")).build().unwrap_err(), EventError::TwoPayloads);
}

#[test]
fn a5_the_payload_limit_is_one_mebibyte_of_utf8() {
    assert_eq!(MAX_PAYLOAD, 1_048_576);
    let text = |text: String| Event::text("t", text).build();
    assert!(text("é".repeat(MAX_PAYLOAD / 2)).is_ok());
    let too_large = EventError::PayloadTooLarge(MAX_PAYLOAD + 1);
    assert_eq!(text("é".repeat(MAX_PAYLOAD / 2) + "x").unwrap_err(), too_large);
    let bytes = |length| Event::builder("t").bytes(Bytes::from(vec![0; length])).build();
    assert!(bytes(MAX_PAYLOAD).is_ok());
    assert_eq!(bytes(MAX_PAYLOAD + 1).unwrap_err(), too_large);
}

#[test]
fn a6_changing_the_source_buffer_does_not_change_the_event() {
    let mut body = vec![1, 2, 3];
    let event = Event::builder("t").bytes(Bytes::copy_from_slice(&body)).build().unwrap();
    body[0] = 9;
    let mut copy = event.payload().clone().into_bytes().to_vec();
    copy[1] = 9;
    assert_eq!(event.payload().as_bytes(), [1, 2, 3]);
}

#[test]
fn a7_a_header_needs_a_name() {
    let error = minimal().header("", "x").build().unwrap_err();
    assert_eq!(error, EventError::EmptyHeaderName);
    assert!(error.to_string().contains("header name"));
}

#[test]
fn a8_an_event_needs_a_type() {
    assert_eq!(Event::text("", "{}").build().unwrap_err(), EventError::EmptyType);
}

#[test]
fn a9_available_at_may_not_precede_occurred_at() {
    let at = |time| minimal().occurred_at(noon()).available_at(time).build();
    let later = noon() + TimeDelta::milliseconds(1);
    let delayed = at(later).unwrap();
    assert!(delayed.is_delayed() && delayed.delay() == Delay::Until(later));
    assert!(!at(noon()).unwrap().is_delayed());
    let error = at(noon() - TimeDelta::milliseconds(1)).unwrap_err().to_string();
    assert!(error.contains("available_at") && error.contains("occurred_at"), "{error}");
}

#[test]
fn a10_deliver_after_must_be_positive() {
    let after = |wait: Duration| minimal().occurred_at(noon()).deliver_after(wait).build();
    let wait = Duration::from_secs(5);
    let delayed = after(wait).unwrap();
    assert!(delayed.is_delayed());
    assert_eq!(delayed.delay(), Delay::For(wait), "the writer's clock has no effect");
    assert_eq!(after(Duration::ZERO).unwrap_err(), EventError::ZeroDelay);
    assert!(!minimal().build().unwrap().is_delayed());
}

#[test]
fn a11_an_event_accepts_only_one_delay() {
    let both = minimal().available_at(noon()).deliver_after(Duration::from_secs(1)).build();
    assert_eq!(both.unwrap_err(), EventError::TwoDelays);
    let cleared = minimal().deliver_after(Duration::from_secs(1)).deliver_after(None).build();
    assert!(!cleared.unwrap().is_delayed(), "None means no delay");
}

/// An event type of a service: any type that converts into a text.
#[derive(Clone, Copy)]
enum OrderEvent {
    Placed,
}

impl From<OrderEvent> for String {
    fn from(event: OrderEvent) -> Self {
        match event {
            OrderEvent::Placed => "order.placed".to_owned(),
        }
    }
}

#[test]
fn a12_an_enum_and_its_text_are_the_same_type() {
    let of_enum = Event::text(OrderEvent::Placed, "{}").build().unwrap();
    let of_text = Event::text("order.placed", "{}").build().unwrap();
    assert_eq!(of_enum.event_type(), of_text.event_type());
    let listeners = Listeners::new().on(OrderEvent::Placed, |_| async {}).unwrap();
    assert!(listeners.on("order.placed", |_| async {}).is_err(), "both register the same type");
    assert!(Listeners::new().on("", |_| async {}).is_err());
}

#[test]
fn a13_a_type_must_state_its_name() {
    // Only a text, or a type that converts into one, can name an event type. A closure or an anonymous type cannot.
    fn named<T: Into<String>>(name: T) -> String {
        Event::text(name, "{}").build().unwrap().event_type().to_owned()
    }
    assert_eq!(named(OrderEvent::Placed), "order.placed");
}

#[test]
fn a14_the_debug_form_hides_the_payload() {
    let event = minimal().id("my-id".to_owned()).aggregate("order", 7).text("secret".to_owned());
    let event = event.occurred_at(noon()).available_at(noon() + TimeDelta::days(1)).build().unwrap();
    let text = format!("{event:?}");
    for part in ["my-id", "order.placed", "\"order\"", "\"7\"", "2026-01-02"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(!text.contains("secret"), "{text}");
}
