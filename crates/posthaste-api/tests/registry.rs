//! Definitions and subscriptions: what callers may send, and what the server never returns.

use std::time::Duration;

use chrono::DateTime;
use posthaste_api::{
    ANY, AuthIn, AuthOut, Definition, DefinitionIn, EventKey, FieldError, Headers, PayloadType, Protocol, Subscription,
    SubscriptionIn, Target, suggest,
};
use serde_json::{Value, json};
use uuid::Uuid;

fn fields(errors: Vec<FieldError>) -> Vec<String> {
    errors.into_iter().map(|error| error.field).collect()
}

fn subscription(changes: Value) -> SubscriptionIn {
    let mut subscription = json!({
        "subscriberId": "crm", "eventKey": { "eventType": "order.placed" }, "endpoint": "https://example.com/hook",
    });
    for (name, value) in changes.as_object().unwrap() {
        subscription[name] = value.clone();
    }
    serde_json::from_value(subscription).unwrap()
}

fn explained<T: serde::de::DeserializeOwned + std::fmt::Debug>(value: Value) -> String {
    suggest::explain(&serde_json::from_value::<T>(value).unwrap_err().to_string())
}

#[test]
fn an_absent_part_of_a_definition_means_any() {
    let parsed: DefinitionIn = serde_json::from_value(json!({ "eventType": "order.placed" })).unwrap();
    let (key, description) = parsed.validate().unwrap();
    assert_eq!((key.event_type.as_str(), key.source_service.as_str(), description), ("order.placed", ANY, None));
    let definition = Definition {
        id: Uuid::nil(),
        key,
        description: None,
        created_at: DateTime::UNIX_EPOCH,
        updated_at: DateTime::UNIX_EPOCH,
    };
    let written = serde_json::to_value(&definition).unwrap();
    assert_eq!(
        written,
        json!({
            "id": Uuid::nil(), "sourceService": "*", "eventType": "order.placed", "resourceType": "*",
            "operationType": "*", "createdAt": "1970-01-01T00:00:00Z", "updatedAt": "1970-01-01T00:00:00Z",
        })
    );
    assert_eq!(serde_json::from_value::<Definition>(written).unwrap(), definition);
}

#[test]
fn a_definition_is_checked() {
    let bad = json!({
        "eventType": "order placed", "sourceService": "", "resourceType": "x".repeat(129), "description": "x".repeat(1_001),
    });
    let bad: DefinitionIn = serde_json::from_value(bad).unwrap();
    let expected = ["eventType", "sourceService", "resourceType", "description"];
    assert_eq!(fields(bad.validate().unwrap_err()), expected);
    let unknown = explained::<DefinitionIn>(json!({ "eventtype": "x" }));
    assert_eq!(unknown, "unknown field \"eventtype\"; did you mean \"eventType\"?");
}

#[test]
fn any_matches_an_absent_field_too() {
    let key = EventKey { event_type: "order.placed".into(), resource_type: "order".into(), ..EventKey::default() };
    assert!(key.matches(None, "order.placed", Some("order"), None));
    assert!(key.matches(Some("shop"), "order.placed", Some("order"), Some("CREATE")));
    assert!(!key.matches(None, "order.placed", None, None));
    assert!(!key.matches(None, "order.paid", Some("order"), None));
}

#[test]
fn a_subscription_has_sensible_defaults() {
    let new = subscription(json!({})).validate().unwrap();
    assert_eq!((new.protocol, new.payload_type, new.active), (Protocol::Http, PayloadType::Json, true));
    assert_eq!((new.auth, new.timeout, new.max_retry, new.headers), (None, None, None, None));
    let key = EventKey { event_type: "order.placed".into(), ..EventKey::default() };
    assert_eq!(new.target, Target::Key(key));
}

#[test]
fn a_subscription_is_read_whole() {
    let id = Uuid::now_v7();
    let new = subscription(json!({
        "eventKey": null, "definitionId": id, "protocol": "HTTP", "payloadType": "PAYLOAD_TYPE_BINARY",
        "auth": { "type": "JWT_HEADER", "token": "abc" }, "headers": { "x-team": "a" }, "timeout": "500ms",
        "maxRetry": 0, "active": false,
    }));
    let new = new.validate().unwrap();
    assert_eq!(new.target, Target::Definition(id));
    assert_eq!((new.timeout, new.max_retry, new.active), (Some(Duration::from_millis(500)), Some(0), false));
    assert_eq!(new.headers, Some(Headers(vec![("x-team".into(), "a".into())])));
    assert_eq!(new.auth, Some(AuthIn::JwtHeader { token: Some("abc".to_owned().into()) }));
}

#[test]
fn a_subscription_is_checked() {
    for (changes, field) in [
        (json!({ "subscriberId": "" }), "subscriberId"),
        (json!({ "endpoint": "" }), "endpoint"),
        (json!({ "eventKey": null }), "definitionId"),
        (json!({ "eventKey": null, "definitionId": "7" }), "definitionId"),
        (json!({ "definitionId": Uuid::nil() }), "eventKey"),
        (json!({ "eventKey": { "eventType": "a b" } }), "eventKey.eventType"),
        (json!({ "eventKey": { "operationType": "" } }), "eventKey.operationType"),
        (json!({ "timeout": "5" }), "timeout"),
        (json!({ "timeout": "0ms" }), "timeout"),
        (json!({ "timeout": "2m" }), "timeout"),
        (json!({ "maxRetry": 101 }), "maxRetry"),
        (json!({ "auth": { "type": "BASIC_AUTH", "username": "a:b", "password": "p" } }), "auth.username"),
        (json!({ "auth": { "type": "BASIC_AUTH", "username": "", "password": "p" } }), "auth.username"),
        (json!({ "auth": { "type": "BASIC_AUTH", "username": "a", "password": "p\n" } }), "auth.password"),
        (json!({ "auth": { "type": "BASIC_AUTH", "username": "a" } }), "auth.password"),
        (json!({ "auth": { "type": "HEADER_TOKEN" } }), "auth.token"),
        (json!({ "auth": { "type": "JWT_HEADER", "token": "a b" } }), "auth.token"),
    ] {
        let shown = changes.to_string();
        assert_eq!(fields(subscription(changes).validate().unwrap_err()), [field], "{shown}");
    }
    let update = subscription(json!({ "auth": { "type": "BASIC_AUTH", "username": "a" } }));
    assert!(update.validate_update().unwrap().auth.unwrap().keeps_secret());
}

#[test]
fn unsupported_values_are_named() {
    let with_auth = |auth: Value| explained::<SubscriptionIn>(json!({ "auth": auth }));
    let oauth = with_auth(json!({ "type": "OAUTH", "grantType": "client_credentials", "tokenUrl": "https://x" }));
    assert_eq!(oauth, "unknown value \"OAUTH\"; known: NONE, BASIC_AUTH, HEADER_TOKEN, JWT_HEADER");
    assert!(with_auth(json!({ "type": "QUERY_PARAMETER", "name": "n", "token": "t" })).contains("known: NONE"));
    assert!(with_auth(json!({ "type": "BASIC" })).contains("BASIC_AUTH"));
    assert!(with_auth(json!({ "type": "NONE", "token": "t" })).contains("unknown field \"token\""));
    assert!(with_auth(json!({ "type": "BASIC_AUTH", "user": "a" })).contains("unknown field \"user\""));
    assert!(explained::<SubscriptionIn>(json!({ "protocol": "HTTPS" })).contains("did you mean \"HTTP\"?"));
    let url = explained::<SubscriptionIn>(json!({ "end_point": "x" }));
    assert_eq!(url, "unknown field \"end_point\"; did you mean \"endpoint\"?");
}

#[test]
fn secrets_are_never_returned() {
    let auths = [
        json!({ "type": "NONE" }),
        json!({ "type": "BASIC_AUTH", "username": "crm", "password": "s3cret" }),
        json!({ "type": "HEADER_TOKEN", "token": "s3cret" }),
        json!({ "type": "JWT_HEADER", "token": "s3cret" }),
    ];
    for auth in auths {
        let subscription_in = subscription(json!({ "auth": auth }));
        assert!(!format!("{subscription_in:?}").contains("s3cret"));
        let new = subscription_in.validate().unwrap();
        assert!(!format!("{new:?}").contains("s3cret"));
        let out = Subscription {
            id: Uuid::nil(),
            subscriber_id: new.subscriber_id,
            definition_id: Uuid::nil(),
            event_key: EventKey::default(),
            endpoint: new.endpoint,
            protocol: new.protocol,
            payload_type: new.payload_type,
            auth: new.auth.unwrap().public(),
            headers: new.headers.unwrap_or_default(),
            timeout: None,
            max_retry: None,
            tenant_id: None,
            filter: Vec::new(),
            active: true,
            created_at: DateTime::UNIX_EPOCH,
            updated_at: DateTime::UNIX_EPOCH,
        };
        let written = serde_json::to_string(&out).unwrap();
        assert!(!written.contains("s3cret"), "{written}");
        assert!(written.contains(&format!("\"type\":{}", auth["type"])), "{written}");
        assert_eq!(serde_json::from_str::<Subscription>(&written).unwrap(), out);
    }
    let basic = AuthOut::BasicAuth { username: "crm".into() };
    assert_eq!(serde_json::to_value(basic).unwrap(), json!({ "type": "BASIC_AUTH", "username": "crm" }));
}

#[test]
fn clients_can_send_secrets() {
    let auth = json!({ "type": "BASIC_AUTH", "username": "crm", "password": "s3cret" });
    let written = serde_json::to_value(subscription(json!({ "auth": auth }))).unwrap();
    assert_eq!(written["auth"], auth);
}
