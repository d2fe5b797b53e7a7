use serde_json::{Value, json};

use crate::api::Answer;
use crate::process::{Installation, items};
use crate::subscriber::Subscriber;

const JSON: (&str, &str) = ("content-type", "application/json");

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_get_a_helpful_problem_document_and_store_nothing() {
    let installation = Installation::new(&[]);
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("*", "all", &subscriber.endpoint()).await;
    let large = format!(r#"{{"eventType":"t","sourceService":"s","payload":"{}"}}"#, "x".repeat(1_048_576));
    let huge = "x".repeat(3 * 1024 * 1024);
    let many = json!(vec![json!({ "eventType": "t", "sourceService": "s", "payload": 1 }); 1_001]).to_string();
    let event = |body: &str| ("POST", "/api/events", vec![JSON], body.to_owned());
    let cases = [
        (event("{"), 400, "malformed", "EOF"),
        (event("[]"), 400, "invalid", "/api/events/batch"),
        (event("7"), 400, "invalid", "object"),
        (event(r#"{"eventTyp":"t"}"#), 400, "invalid", "did you mean \"eventType\"?"),
        (event(r#"{"eventType":"t","payload":1}"#), 400, "invalid", "sourceService"),
        (event(r#"{"eventType":"a b","sourceService":"s","payload":1}"#), 400, "invalid", "eventType"),
        (event(r#"{"eventType":"t","sourceService":"s"}"#), 400, "invalid", "payload"),
        (event(r#"{"eventType":"t","sourceService":"s","payload":1,"eventId":"a/b"}"#), 400, "invalid", "eventId"),
        (event(&large), 400, "invalid", "1048576"),
        (event(&huge), 413, "too_large", "smaller"),
        (
            ("POST", "/api/events", vec![("content-type", "text/plain")], "{}".to_owned()),
            415,
            "unsupported_media_type",
            "JSON",
        ),
        (("POST", "/api/events", vec![], "{}".to_owned()), 415, "unsupported_media_type", "JSON"),
        (("POST", "/api/events/batch", vec![JSON], "{}".to_owned()), 400, "malformed", "array"),
        (("POST", "/api/events/batch", vec![JSON], many), 413, "too_large", "1000"),
        (
            ("POST", "/api/events/batch?atomc=true", vec![JSON], "[]".to_owned()),
            400,
            "invalid",
            "did you mean \"atomic\"?",
        ),
        (("POST", "/api/replay", vec![JSON], r#"{"ids":[]}"#.to_owned()), 400, "invalid", "ids"),
        (("POST", "/api/replay", vec![JSON], r#"{"ids":["x"]}"#.to_owned()), 400, "invalid", "UUID"),
        (("GET", "/api/dlt-messages?size=501", vec![], String::new()), 400, "invalid", "500"),
        (("GET", "/api/dlt-messages?state=NEW", vec![], String::new()), 400, "invalid", "state"),
        (("GET", "/api/dlt-messages?status=OLD", vec![], String::new()), 400, "invalid", "PROCESSED"),
        (("GET", "/api/dlt-messages?from=yesterday", vec![], String::new()), 400, "invalid", "from"),
        (("GET", "/api/dlt-messages/7", vec![], String::new()), 404, "not_found", "no dead letter with the id \"7\""),
        (("GET", "/api/events/unheard-of", vec![], String::new()), 404, "not_found", "event"),
        (("GET", "/api/nothing", vec![], String::new()), 404, "not_found", "path"),
        (("DELETE", "/api/events", vec![], String::new()), 405, "method_not_allowed", "method"),
        (("GET", "/healthz", vec![("host", "evil.example")], String::new()), 403, "foreign_host", "localhost"),
    ];
    for ((method, path, headers, body), status, code, hint) in cases {
        let shown = format!("{method} {path} {}", &body[..body.len().min(80)]);
        let answer =
            server.api.send(method, path, &headers, body).await.unwrap_or_else(|error| panic!("{shown}: {error}"));
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{shown}: {}", answer.text);
        let detail = answer.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains(hint), "{shown}: {detail}");
    }
    // Only the valid event arrives.
    let id = server.api.publish("good", "1").await;
    subscriber.wait_for(1).await;
    assert!(server.terminate().await.success());
    let arrivals = subscriber.arrivals();
    assert_eq!((arrivals.len(), arrivals[0].event_id.as_str()), (1, id.as_str()));
}

/// The fields that a response reports as invalid.
fn fields(answer: &Answer) -> Vec<String> {
    assert_eq!((answer.status, answer.code().as_str()), (400, "invalid"), "{}", answer.text);
    let errors = answer.json()["errors"].as_array().cloned().unwrap_or_default();
    errors.iter().map(|error| error["field"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_response_lists_every_invalid_field_of_a_request() {
    let installation = Installation::new(&[]);
    let server = installation.start().await;
    let post =
        async |path: &str, body: serde_json::Value| fields(&server.api.post(path, body.to_string()).await.unwrap());
    let event = json!({ "eventType": 5, "sourceService": "a\u{0}b", "tenantId": "x\ny", "aggregateId": true,
        "headers": { "a": "b", "n": 1 }, "colour": "red", "payload": 1 });
    let expected = ["eventType", "aggregateId", "headers.n", "colour", "sourceService", "tenantId"];
    assert_eq!(sorted(post("/api/events", event).await), sorted(expected));
    assert_eq!(
        post("/api/events", json!({ "payloadBase64": 7, "eventType": "t", "sourceService": "s" })).await,
        ["payloadBase64"]
    );
    let subscription = json!({ "subscriberId": "a\u{7}", "eventKey": { "eventType": 1, "resourceType": "" },
        "endpoint": "localhost:9000", "maxRetry": "three", "headers": { "host": "x" },
        "auth": { "type": "BASIC_AUTH", "username": 5, "token": "t" } });
    let expected =
        ["subscriberId", "eventKey.eventType", "endpoint", "maxRetry", "headers", "auth.username", "auth.token"];
    assert_eq!(sorted(post("/api/subscriptions", subscription).await), sorted(expected));
    let replay = json!({ "ids": ["x", "00000000-0000-0000-0000-000000000000", 7], "reason": "a\u{0}" });
    assert_eq!(sorted(post("/api/replay", replay).await), sorted(["ids[0]", "ids[2]", "reason"]));
    let query = "/api/dlt-messages?size=501&page=x&status=OLD&from=now&colour=red&sort=up&page=2";
    let answer = server.api.get(query).await.unwrap();
    assert_eq!(sorted(fields(&answer)), sorted(["colour", "from", "page", "page", "size", "sort", "status"]));
    assert_eq!(server.api.get("/api/dlt-messages?status=all").await.unwrap().status, 200);
}

fn sorted(fields: impl IntoIterator<Item = impl Into<String>>) -> Vec<String> {
    let mut fields: Vec<String> = fields.into_iter().map(Into::into).collect();
    fields.sort();
    fields
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_idempotency_key_is_refused_and_not_ignored() {
    let installation = Installation::new(&[]);
    let server = installation.start().await;
    let body = r#"{"eventType":"t","sourceService":"s","payload":1}"#;
    for key in ["order 1", "bestellung-ü", "", "order/1"] {
        let headers = [JSON, ("idempotency-key", key)];
        let answer = server.api.send("POST", "/api/events", &headers, body).await.unwrap();
        assert_eq!(fields(&answer), ["Idempotency-Key"], "{key:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn creating_the_same_subscription_again_returns_the_existing_one() {
    let installation = Installation::new(&[]);
    let server = installation.start().await;
    server.api.subscribe("t", "first", "http://127.0.0.1:1/").await;
    let subscription = |endpoint: &str| {
        json!({ "subscriberId": "billing", "eventKey": { "eventType": "t" }, "endpoint": endpoint }).to_string()
    };
    let made = server.api.post("/api/subscriptions", subscription("http://127.0.0.1:1/hook?token=a")).await.unwrap();
    let again = server.api.post("/api/subscriptions", subscription("http://127.0.0.1:1/hook?token=a")).await.unwrap();
    assert_eq!((made.status, again.status), (201, 200), "{}", again.text);
    assert_eq!(made.json()["id"], again.json()["id"]);
    let other = server.api.post("/api/subscriptions", subscription("http://127.0.0.1:1/hook?token=b")).await.unwrap();
    assert_eq!(other.status, 201, "another token is another address");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_has_a_result_for_each_event_and_an_atomic_batch_stores_all_or_none() {
    let installation = Installation::new(&[]);
    let server = installation.start().await;
    let good = |id: &str| json!({ "eventId": id, "eventType": "t", "sourceService": "s", "payload": 1 });
    let bad = json!({ "eventType": "t", "sourceService": "s" });
    let mixed = json!([good("a"), bad, good("b"), good("a")]).to_string();
    let answer = server.api.post("/api/events/batch", mixed.clone()).await.unwrap();
    assert_eq!(answer.status, 202);
    let results = answer.json()["results"].clone();
    let statuses: Vec<_> =
        results.as_array().unwrap().iter().map(|result| result["status"].as_u64().unwrap()).collect();
    assert_eq!(statuses, [202, 400, 202, 200]);
    assert_eq!(results[1]["code"], "invalid");

    let atomic = json!([good("c"), bad]).to_string();
    let answer = server.api.post("/api/events/batch?atomic=true", atomic).await.unwrap();
    assert_eq!((answer.status, answer.code().as_str()), (400, "batch_refused"));
    assert_eq!(answer.json()["errors"][0]["field"], "[1]");
    assert_eq!(server.api.get("/api/events/c").await.unwrap().status, 404);

    let conflicting = json!([good("d"), { "eventId": "a", "eventType": "t", "sourceService": "s", "payload": 2 }]);
    let answer = server.api.post("/api/events/batch?atomic=true", conflicting.to_string()).await.unwrap();
    assert_eq!(answer.status, 400, "{}", answer.text);
    assert_eq!(server.api.get("/api/events/d").await.unwrap().status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_registry_refuses_invalid_definitions_and_subscriptions() {
    let installation = Installation::new(&[]);
    let server = installation.start().await;
    let api = &server.api;
    let definition = json!({ "eventType": "order.placed", "sourceService": "shop" });
    let created = api.post("/api/event-definitions", definition.to_string()).await.unwrap();
    assert_eq!(created.status, 201);
    let definition_id = created.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(created.json()["resourceType"], "*");
    let again = api.post("/api/event-definitions", definition.to_string()).await.unwrap();
    assert_eq!((again.status, again.code().as_str()), (409, "definition_exists"));

    let subscription = |endpoint: &str| {
        json!({ "subscriberId": "billing", "definitionId": definition_id, "endpoint": endpoint,
            "auth": { "type": "BASIC_AUTH", "username": "u", "password": "hunter2" } })
    };
    for endpoint in ["", "ftp://x/y", "http://", "not a url", "http://user:pw@host/", "http://host/#part"] {
        let refused = api.post("/api/subscriptions", subscription(endpoint).to_string()).await.unwrap();
        assert_eq!((refused.status, refused.code().as_str()), (400, "invalid"), "{endpoint}: {}", refused.text);
        assert!(refused.text.contains("endpoint"), "{}", refused.text);
    }
    let mut unknown = subscription("http://127.0.0.1:1/");
    unknown["definitionId"] = json!("0198c000-0000-7000-8000-000000000000");
    let refused = api.post("/api/subscriptions", unknown.to_string()).await.unwrap();
    assert_eq!((refused.status, refused.code().as_str()), (409, "unknown_definition"));
    let mut header = subscription("http://127.0.0.1:1/");
    header["headers"] = json!({ "Host": "other" });
    assert_eq!(api.post("/api/subscriptions", header.to_string()).await.unwrap().status, 400);
    assert_eq!(api.get("/api/subscriptions").await.unwrap().json()["total"], 0);

    let created = api.post("/api/subscriptions", subscription("http://127.0.0.1:1/hook").to_string()).await.unwrap();
    assert_eq!(created.status, 201);
    assert!(!created.text.contains("hunter2"), "secrets are write-only");
    let etag = created.headers["etag"].to_str().unwrap().to_owned();
    let path = format!("/api/subscriptions/{}", created.json()["id"].as_str().unwrap());
    let in_use = api.send("DELETE", &format!("/api/event-definitions/{definition_id}"), &[], "").await.unwrap();
    assert_eq!((in_use.status, in_use.code().as_str()), (409, "definition_in_use"));

    let mut update = subscription("http://127.0.0.1:1/other");
    update["auth"] = json!({ "type": "BASIC_AUTH", "username": "u2" });
    let updated = api.send("PUT", &path, &[JSON, ("if-match", &etag)], update.to_string()).await.unwrap();
    assert_eq!((updated.status, &updated.json()["auth"]["username"]), (200, &json!("u2")));
    let stale = api.send("PUT", &path, &[JSON, ("if-match", &etag)], update.to_string()).await.unwrap();
    assert_eq!((stale.status, stale.code().as_str()), (412, "stale"));
    let list = api.get("/api/subscriptions?subscriberId=billing").await.unwrap().json();
    assert_eq!(items(&list)[0]["endpoint"], "http://127.0.0.1:1/other");
    assert_eq!(api.send("DELETE", &path, &[], "").await.unwrap().status, 204);
    assert_eq!(api.get(&path).await.unwrap().status, 404);

    let database = std::fs::read(installation.database()).unwrap();
    let wal = std::fs::read(installation.database().with_extension("db-wal")).unwrap_or_default();
    let contains_secret = |bytes: &[u8]| bytes.windows(7).any(|window| window == b"hunter2");
    assert!(!contains_secret(&database) && !contains_secret(&wal), "secrets are sealed at rest");
}

#[tokio::test(flavor = "multi_thread")]
async fn event_types_that_share_a_topic_are_refused() {
    let installation = Installation::new(&[("BUS__MAX_CHANNELS", "2")]);
    let server = installation.start().await;
    server.api.publish("a.b", "1").await;
    let event = |event_type: &str| json!({ "eventType": event_type, "sourceService": "s", "payload": 1 }).to_string();
    let collision = server.api.post("/api/events", event("a_b")).await.unwrap();
    assert_eq!((collision.status, collision.code().as_str()), (409, "event_type_collision"));
    server.api.publish("c", "1").await;
    let one_more = server.api.post("/api/events", event("d")).await.unwrap();
    assert_eq!((one_more.status, one_more.code().as_str()), (409, "too_many_channels"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_reset_of_a_position_names_each_bad_field_once() {
    let installation = Installation::new(&[]);
    let server = installation.start().await;
    let fields = async |body: Value| {
        let refused = server.api.post("/api/topics/reset", body.to_string()).await.unwrap();
        assert_eq!(refused.status, 400, "{}", refused.text);
        let errors = refused.json()["errors"].as_array().unwrap().clone();
        errors.iter().map(|error| error["field"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(fields(json!({ "topic": "t", "group": "g", "to": "middle" })).await, ["to"]);
    assert_eq!(fields(json!({ "topic": "t", "group": "" })).await, ["group", "to"]);
    let unknown = json!({ "topic": "t", "group": "g", "to": "latest" }).to_string();
    assert_eq!(server.api.post("/api/topics/reset", unknown).await.unwrap().status, 404);
}
