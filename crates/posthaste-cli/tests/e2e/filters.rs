//! Subscriptions with a filter or a tenant receive only the events that match.

use serde_json::{Value, json};

use crate::api::Api;
use crate::process::{Backend, Installation, items, on_each_backend};
use crate::subscriber::Subscriber;

on_each_backend! {
    a_filter_selects_events_by_their_payload
    a_refused_filter_stores_nothing
    a_filter_is_shown_changed_and_removed_on_the_command_line
    a_tenant_receives_its_own_events_only
}

/// Creates a subscription to `order.placed` of a new subscriber.
async fn subscribed(api: &Api, more: Value) -> Subscriber {
    let subscriber = Subscriber::start().await;
    let defined = api.post("/api/event-definitions", json!({ "eventType": "order.placed" }).to_string()).await.unwrap();
    assert!(matches!(defined.status, 201 | 409), "{}", defined.text);
    let mut subscription = json!({
        "subscriberId": "billing", "eventKey": { "eventType": "order.placed" }, "endpoint": subscriber.endpoint(),
    });
    subscription.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let created = api.post("/api/subscriptions", subscription.to_string()).await.unwrap();
    assert_eq!(created.status, 201, "{}", created.text);
    assert_eq!(created.json().get("filter"), more.get("filter"), "{}", created.text);
    subscriber
}

/// The payloads that arrived, sorted, after this many did.
async fn arrived(subscriber: &Subscriber, count: usize) -> Vec<String> {
    let arrivals = subscriber.wait_for(count).await;
    let mut bodies: Vec<_> = arrivals.iter().map(|one| String::from_utf8_lossy(&one.body).into_owned()).collect();
    bodies.sort();
    bodies
}

async fn a_filter_selects_events_by_their_payload(backend: Backend) {
    let installation = Installation::on(backend, &[]).await;
    let server = installation.start().await;
    let german = json!({ "filter": [{ "path": "/country", "op": "eq", "value": "DE" }] });
    let german = subscribed(&server.api, german).await;
    let large = json!({ "filter": [
        { "path": "/total", "op": "in", "value": [100, 200] }, { "path": "/test", "op": "exists", "value": false },
    ] });
    let large = subscribed(&server.api, large).await;
    let all = subscribed(&server.api, json!({})).await;

    let payloads = [
        r#"{"country":"DE","total":1}"#,
        r#"{"country":"AT","total":1e2}"#,
        r#"{"country":"DE","total":200,"test":null}"#,
    ];
    for payload in payloads {
        server.api.publish("order.placed", payload).await;
    }
    let bytes = r#"{"eventType":"order.placed","sourceService":"e2e","payloadBase64":"bm90IEpTT04=","contentType":"text/plain"}"#;
    assert_eq!(server.api.post("/api/events", bytes).await.unwrap().status, 202);
    // Each event is routed to all its subscriptions at once, so the events before the last one are routed when it is.
    all.wait_for(4).await;
    let last = r#"{"country":"DE","total":100.0}"#;
    server.api.publish("order.placed", last).await;
    all.wait_for(5).await;
    assert_eq!(arrived(&german, 3).await, [last, payloads[0], payloads[2]].map(str::to_owned));
    assert_eq!(arrived(&large, 2).await, [payloads[1], last].map(str::to_owned));
    assert!(server.terminate().await.success());
}

async fn a_refused_filter_stores_nothing(backend: Backend) {
    let installation = Installation::on(backend, &[]).await;
    let server = installation.start().await;
    let subscriber = subscribed(&server.api, json!({})).await;
    let list = server.api.get("/api/subscriptions").await.unwrap().json();
    let before = items(&list)[0].clone();
    let wrong = json!({
        "subscriberId": "crm", "eventKey": { "eventType": "order.placed" }, "endpoint": subscriber.endpoint(),
        "filter": [
            { "path": "/a", "op": "exists" }, { "path": "a", "op": "eq", "value": 1 }, { "path": "/a", "op": "prefx", "value": "x" },
        ],
    });
    let refused = server.api.post("/api/subscriptions", wrong.to_string()).await.unwrap();
    assert_eq!((refused.status, refused.code().as_str()), (400, "invalid"), "{}", refused.text);
    let errors = refused.json()["errors"].clone();
    let fields: Vec<_> = errors.as_array().unwrap().iter().map(|error| error["field"].as_str().unwrap()).collect();
    assert_eq!(fields, ["filter[1].path", "filter[2].op"], "{errors}");
    assert!(errors[1]["detail"].as_str().unwrap().contains("did you mean \"prefix\"?"), "{errors}");
    let path = format!("/api/subscriptions/{}", before["id"].as_str().unwrap());
    let headers = [("content-type", "application/json")];
    let refused = server.api.send("PUT", &path, &headers, wrong.to_string()).await.unwrap();
    assert_eq!(refused.status, 400, "{}", refused.text);
    let after = server.api.get("/api/subscriptions").await.unwrap().json();
    assert_eq!(items(&after)[..], [before]);
    assert!(server.terminate().await.success());
}

async fn a_filter_is_shown_changed_and_removed_on_the_command_line(backend: Backend) {
    let installation = Installation::on(backend, &[]).await;
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    let run = |arguments: &[&str]| {
        let ran = installation.command(arguments).output().expect("posthaste runs");
        (ran.status.code(), String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned())
    };
    let endpoint = subscriber.endpoint();
    let create = ["subscriptions", "create", "--event", "order.placed", "--to", &endpoint, "--output", "json"];
    let filters = ["--filter", r#"/country in ["DE", "AT"]"#, "--filter", "/total eq 100.0"];
    let (code, text) = run(&[&create[..], &filters].concat());
    assert_eq!(code, Some(0), "{text}");
    let list = server.api.get("/api/subscriptions").await.unwrap().json();
    let id = items(&list)[0]["id"].as_str().unwrap().to_owned();
    let shown = r#"/country in ["DE", "AT"] and /total eq 100.0"#;
    assert!(run(&["subscriptions", "get", &id]).1.contains(shown));
    assert!(run(&["subscriptions", "list"]).1.contains(shown));

    // A change of something else keeps it.
    let (code, text) = run(&["subscriptions", "update", &id, "--max-retry", "1"]);
    assert!(code == Some(0) && text.contains(shown), "{text}");
    let (code, text) = run(&["subscriptions", "update", &id, "--filter", "/country like 1"]);
    assert!(code != Some(0) && text.contains("filter[0].op"), "{text}");
    let (code, text) = run(&["subscriptions", "update", &id, "--filter", "/note exists false"]);
    assert!(code == Some(0) && text.contains("/note exists false") && !text.contains("country"), "{text}");
    server.api.publish("order.placed", r#"{"note":"x"}"#).await;
    server.api.publish("order.placed", r#"{"country":"FR"}"#).await;
    assert_eq!(&subscriber.wait_for(1).await[0].body[..], br#"{"country":"FR"}"#);
    let (code, text) = run(&["subscriptions", "update", &id, "--no-filter"]);
    assert!(code == Some(0) && !text.contains("/note"), "{text}");
    let list = server.api.get("/api/subscriptions").await.unwrap().json();
    assert_eq!(items(&list)[0].get("filter"), None, "{list}");
    assert!(server.terminate().await.success());
}

async fn a_tenant_receives_its_own_events_only(backend: Backend) {
    let installation = Installation::on(backend, &[]).await;
    let server = installation.start().await;
    let acme = subscribed(&server.api, json!({ "tenantId": "acme" })).await;
    let all = subscribed(&server.api, json!({})).await;
    for (tenant, payload) in [(None, "1"), (Some("other"), "2"), (Some("acme"), "3")] {
        let event = json!({
            "eventType": "order.placed", "sourceService": "e2e", "tenantId": tenant, "payload": payload,
        });
        assert_eq!(server.api.post("/api/events", event.to_string()).await.unwrap().status, 202);
    }
    all.wait_for(3).await;
    let arrivals = acme.wait_for(1).await;
    assert_eq!(arrivals.iter().map(|one| &one.body[..]).collect::<Vec<_>>(), [br#""3""#]);
    assert!(server.terminate().await.success());
}
