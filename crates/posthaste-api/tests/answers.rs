//! The responses of the REST API, as clients read them.

use chrono::DateTime;
use posthaste_api::{
    BatchItem, BatchOut, DeadLetter, DeadLetterDetail, DeadLetterPage, DeadLetterStatus, DeliveryState, Domain,
    EarlierEvents, EventTrace, FieldError, OutboxState, OutboxStatus, Problem, PublishOut, ReplayIn, ReplayOut,
    ReplayResult, RetryAttempt, TopicPosition, TracedDelivery, Trigger, suggest,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use uuid::Uuid;

#[track_caller]
fn assert_json<T: Serialize + DeserializeOwned>(value: &T, expected: Value) {
    let written = serde_json::to_string(value).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&written).unwrap(), expected);
    let read: T = serde_json::from_str(&written).unwrap();
    assert_eq!(serde_json::to_string(&read).unwrap(), written);
}

fn letter() -> DeadLetter {
    DeadLetter {
        id: Uuid::nil(),
        message_id: "evt-1".into(),
        subscription_id: Uuid::nil(),
        subscriber_id: "crm".into(),
        event_type: "order.placed".into(),
        domain: Domain::UserLifecycle,
        endpoint: "https://example.com/".into(),
        status: DeadLetterStatus::Failed,
        retry_count: 3,
        error: Some("HTTP 503 Service Unavailable".into()),
        error_code: Some("503".into()),
        created_at: DateTime::UNIX_EPOCH,
        updated_at: DateTime::UNIX_EPOCH,
    }
}

fn letter_json() -> Value {
    json!({
        "id": Uuid::nil(), "messageId": "evt-1", "subscriptionId": Uuid::nil(), "subscriberId": "crm",
        "eventType": "order.placed", "domain": "user-lifecycle", "endpoint": "https://example.com/",
        "status": "FAILED", "retryCount": 3, "error": "HTTP 503 Service Unavailable", "errorCode": "503",
        "createdAt": "1970-01-01T00:00:00Z", "updatedAt": "1970-01-01T00:00:00Z",
    })
}

#[test]
fn dead_letters() {
    let page = DeadLetterPage {
        items: vec![letter()],
        page: 0,
        size: 50,
        total: 1,
        total_is_lower_bound: false,
        next_cursor: None,
    };
    assert_json(&page, json!({ "items": [letter_json()], "page": 0, "size": 50, "total": 1 }));
    let attempt = RetryAttempt {
        error_code: None,
        error_message: None,
        error_cause: None,
        process_date: DateTime::UNIX_EPOCH,
        trigger: Trigger::Replay,
        duration_ms: 12,
    };
    let event = RawValue::from_string("{\"payload\": 1.50}".into()).unwrap();
    let detail = DeadLetterDetail { letter: letter(), event, failure: None, history: vec![attempt] };
    let mut expected = letter_json();
    expected["event"] = json!({ "payload": 1.5 });
    expected["failure"] = Value::Null;
    expected["history"] = json!([{
        "errorCode": null, "errorMessage": null, "errorCause": null, "processDate": "1970-01-01T00:00:00Z",
        "trigger": "REPLAY", "durationMs": 12,
    }]);
    assert_json(&detail, expected);
    assert!(serde_json::to_string(&detail).unwrap().contains("{\"payload\": 1.50}"));
}

#[test]
fn replays() {
    let asked: ReplayIn = serde_json::from_value(json!({ "ids": [Uuid::nil()], "reason": "fixed" })).unwrap();
    assert_eq!(asked.validate().unwrap().reason.as_deref(), Some("fixed"));
    let empty: ReplayIn = serde_json::from_value(json!({ "ids": [] })).unwrap();
    assert_eq!(empty.validate().unwrap_err()[0].field, "ids");
    let unknown = serde_json::from_value::<ReplayIn>(json!({ "id": [] })).unwrap_err().to_string();
    assert_eq!(suggest::explain(&unknown), "unknown field \"id\"; did you mean \"ids\"?");
    let mut out = ReplayOut { replay_id: Some(Uuid::nil()), matched: 1, results: None };
    assert_json(&out, json!({ "replayId": Uuid::nil(), "matched": 1 }));
    let result = ReplayResult { id: Uuid::nil(), status: DeadLetterStatus::Processed, error_code: None };
    out.results = Some(vec![result]);
    let results = json!([{ "id": Uuid::nil(), "status": "PROCESSED", "errorCode": null }]);
    assert_json(&out, json!({ "replayId": Uuid::nil(), "matched": 1, "results": results }));
}

#[test]
fn publishing() {
    assert_json(&PublishOut { event_id: "evt-1".into() }, json!({ "eventId": "evt-1" }));
    let stored = BatchItem::Stored { event_id: "evt-1".into(), status: 202 };
    let refused = BatchItem::Refused { status: 400, code: "invalid_event".into(), detail: "no".into() };
    let expected = json!({ "results": [
        { "eventId": "evt-1", "status": 202 }, { "status": 400, "code": "invalid_event", "detail": "no" },
    ] });
    assert_json(&BatchOut { results: vec![stored, refused] }, expected);
}

#[test]
fn traces_of_events() {
    let position = TopicPosition { topic: "posthaste.outbox.organization".into(), partition: 3, offset: 7 };
    let trace = EventTrace {
        event_id: "evt-1".into(),
        outbox: Some(OutboxState {
            status: OutboxStatus::Processed,
            exhausted: false,
            attempts: 1,
            next_attempt_at: None,
            last_error: None,
            created_at: DateTime::UNIX_EPOCH,
            processed_at: Some(DateTime::UNIX_EPOCH),
        }),
        topics: Some(vec![position.clone()]),
        deliveries: Some(vec![TracedDelivery {
            subscription_id: Uuid::nil(),
            domain: Domain::Organization,
            position,
            state: DeliveryState::Pending,
        }]),
        dead_letters: vec![letter()],
        earlier: Some(EarlierEvents { topics: None, deliveries: None, dead_letters: vec![letter()] }),
    };
    let outbox = json!({
        "status": "PROCESSED", "exhausted": false, "attempts": 1, "nextAttemptAt": null, "lastError": null,
        "createdAt": "1970-01-01T00:00:00Z", "processedAt": "1970-01-01T00:00:00Z",
    });
    let delivery = json!({
        "subscriptionId": Uuid::nil(), "domain": "organization", "topic": "posthaste.outbox.organization",
        "partition": 3, "offset": 7, "state": "PENDING",
    });
    assert_json(
        &trace,
        json!({
            "eventId": "evt-1", "outbox": outbox, "deliveries": [delivery], "deadLetters": [letter_json()],
            "topics": [{ "topic": "posthaste.outbox.organization", "partition": 3, "offset": 7 }],
            "earlier": { "topics": null, "deliveries": null, "deadLetters": [letter_json()] },
        }),
    );
}

#[test]
fn problems() {
    let plain = Problem::new(404, "not_found", "Not found");
    assert_json(&plain, json!({ "type": "about:blank", "title": "Not found", "status": 404, "code": "not_found" }));
    let errors = vec![FieldError::new("eventType", "is missing")];
    let full = Problem::new(400, "invalid_event", "Invalid event").detail("the event is refused").errors(errors);
    assert_json(
        &full,
        json!({
            "type": "about:blank", "title": "Invalid event", "status": 400, "code": "invalid_event",
            "detail": "the event is refused", "errors": [{ "field": "eventType", "detail": "is missing" }],
        }),
    );
    assert_eq!(full.to_string(), "the event is refused");
}
