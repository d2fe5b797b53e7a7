//! The secrets of a subscription are encrypted in every file and masked in every response.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::process::{Installation, Server, until};
use crate::subscriber::Subscriber;

const TOKEN: &str = "s3cret-in-the-query";
const KEY: &str = "s3cret-in-a-header";
const PASSWORD: &str = "s3cret-as-a-password";

/// Asserts that a text contains no secret.
#[track_caller]
fn is_clean(what: &str, text: &str) {
    for secret in [TOKEN, KEY, PASSWORD] {
        assert!(!text.contains(secret), "{what} shows {secret}: {text}");
    }
}

async fn subscribe(server: &Server, endpoint: &str) -> Value {
    let definition = json!({ "eventType": "t" }).to_string();
    assert_eq!(server.api.post("/api/event-definitions", definition).await.unwrap().status, 201);
    let subscription = json!({
        "subscriberId": "billing", "eventKey": { "eventType": "t" }, "endpoint": endpoint,
        "headers": { "x-api-key": KEY, "x-team": "blue" },
        "auth": { "type": "BASIC_AUTH", "username": "u", "password": PASSWORD },
    });
    let made = server.api.post("/api/subscriptions", subscription.to_string()).await.unwrap();
    assert_eq!(made.status, 201, "{}", made.text);
    is_clean("the response to the creation", &made.text);
    made.json()
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_encrypted_in_files_and_masked_in_responses() {
    let installation = Installation::new(&[("DELIVERY__MAX_RETRY", "0"), ("TELEMETRY__LOG", "debug")]);
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    subscriber.answer(StatusCode::FORBIDDEN);
    let made = subscribe(&server, &format!("{}?token={TOKEN}&v=1", subscriber.endpoint())).await;
    let masked = format!("{}?token=***&v=***", subscriber.endpoint());
    assert_eq!(
        (&made["endpoint"], &made["headers"]),
        (&json!(masked), &json!({ "x-api-key": "***", "x-team": "***" }))
    );
    let id = server.api.publish("t", "1").await;
    let arrival = subscriber.wait_for(1).await.remove(0);
    assert_eq!(arrival.uri.query(), Some(format!("token={TOKEN}&v=1").as_str()));
    assert_eq!(arrival.headers["x-api-key"], KEY);
    assert_eq!(arrival.headers["x-team"], "blue");
    let dead_letter = until("the dead letter", async || {
        let page = server.api.get("/api/dlt-messages?status=all").await.unwrap().json();
        page["items"][0]["id"].as_str().map(str::to_owned)
    })
    .await;
    let subscription = made["id"].as_str().unwrap();
    for path in [
        "/api/subscriptions",
        &format!("/api/subscriptions/{subscription}"),
        "/api/dlt-messages?status=all",
        &format!("/api/dlt-messages/{dead_letter}"),
        &format!("/api/events/{id}"),
        "/metrics",
        "/readyz",
    ] {
        is_clean(path, &server.api.get(path).await.unwrap().text);
    }
    is_clean("the log", &installation.log());
    for file in std::fs::read_dir(installation.folder.path()).unwrap() {
        let path = file.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        is_clean(&path.display().to_string(), &String::from_utf8_lossy(&bytes));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_update_with_masked_values_keeps_the_stored_ones() {
    let installation = Installation::new(&[]);
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    let made = subscribe(&server, &format!("{}?token={TOKEN}", subscriber.endpoint())).await;
    let path = format!("/api/subscriptions/{}", made["id"].as_str().unwrap());
    let put = async |changes: Value| {
        let mut subscription = json!({ "subscriberId": "billing", "definitionId": made["definitionId"],
            "endpoint": made["endpoint"], "headers": made["headers"] });
        for (name, value) in changes.as_object().unwrap() {
            subscription[name] = value.clone();
        }
        server.api.send("PUT", &path, &[("content-type", "application/json")], subscription.to_string()).await.unwrap()
    };
    let changed = put(json!({ "headers": { "x-api-key": "***", "x-new": "n" }, "timeout": "2s" })).await;
    assert_eq!(changed.status, 200, "{}", changed.text);
    is_clean("the response to the change", &changed.text);
    server.api.publish("t", "1").await;
    let arrival = subscriber.wait_for(1).await.remove(0);
    assert_eq!(arrival.uri.query(), Some(format!("token={TOKEN}").as_str()));
    assert_eq!(arrival.headers["x-api-key"], KEY);
    assert_eq!(arrival.headers["x-new"], "n");
    assert!(arrival.headers["authorization"].to_str().unwrap().starts_with("Basic "));
    assert!(!arrival.headers.contains_key("x-team"), "it was left out");

    // A masked value is refused for another endpoint, header or subscription, which has no stored value.
    let elsewhere = put(json!({ "endpoint": "http://127.0.0.1:1/hook?token=***" })).await;
    assert_eq!((elsewhere.status, &elsewhere.json()["errors"][0]["field"]), (400, &json!("endpoint")));
    let unknown = put(json!({ "headers": { "x-other": "***" } })).await;
    assert_eq!((unknown.status, &unknown.json()["errors"][0]["field"]), (400, &json!("headers.x-other")));
    let new = json!({ "subscriberId": "b", "definitionId": made["definitionId"], "endpoint": made["endpoint"],
        "headers": { "a": "***" } });
    let new = server.api.post("/api/subscriptions", new.to_string()).await.unwrap();
    assert_eq!((new.status, new.json()["errors"].as_array().map(Vec::len)), (400, Some(2)), "{}", new.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generated_key_can_be_used() {
    let installation = Installation::new(&[("SECRETS__KEY_FILE", "own.key")]);
    let generated = installation.command(&["secrets", "generate"]).output().expect("posthaste runs");
    assert!(generated.status.success());
    let key = installation.folder.path().join("own.key");
    std::fs::write(&key, &generated.stdout).unwrap();
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let server = installation.start().await;
    subscribe(&server, "http://127.0.0.1:9/hook").await;
    assert_eq!(std::fs::read(&key).unwrap(), generated.stdout, "the server keeps the key");
}
