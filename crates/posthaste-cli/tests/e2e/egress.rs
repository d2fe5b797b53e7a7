//! Endpoints that lead into the network behind the server, as an attacker would try them.

use serde_json::{Value, json};

use crate::api::{Answer, Api};
use crate::process::{Backend, Installation, items, on_each_backend, until};
use crate::subscriber::Subscriber;

on_each_backend! {
    a_stored_endpoint_that_the_server_may_not_call_any_more_fails_permanently
}

async fn create(api: &Api, endpoint: &str) -> Answer {
    let subscription = json!({ "subscriberId": "x", "eventKey": { "eventType": "t" }, "endpoint": endpoint });
    api.post("/api/subscriptions", subscription.to_string()).await.unwrap()
}

async fn define(api: &Api) {
    let defined = api.post("/api/event-definitions", json!({ "eventType": "t" }).to_string()).await.unwrap();
    assert_eq!(defined.status, 201, "{}", defined.text);
}

#[track_caller]
fn assert_refused(answer: &Answer, parts: &[&str]) {
    assert_eq!((answer.status, answer.code().as_str()), (400, "invalid"), "{}", answer.text);
    let problem = answer.json();
    assert_eq!(problem["errors"].as_array().map(Vec::len), Some(1), "{problem}");
    assert_eq!(problem["errors"][0]["field"], "endpoint");
    let detail = problem["errors"][0]["detail"].as_str().unwrap();
    for part in parts {
        assert!(detail.contains(part), "{detail}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_that_are_not_public_are_refused_unless_the_configuration_allows_them() {
    let mut installation = Installation::new(&[]);
    let server = installation.start().await;
    define(&server.api).await;
    for (host, range) in [
        ("10.1.2.3", "10.0.0.0/8 (private use, RFC 1918)"),
        ("0xa010203", "10.0.0.0/8 (private use, RFC 1918)"),
        ("[::ffff:10.1.2.3]", "10.0.0.0/8 (private use, RFC 1918)"),
        ("169.254.169.254", "169.254.0.0/16 (link-local, RFC 3927)"),
        ("0", "0.0.0.0/8 (this network, RFC 791)"),
        ("[fd00:ec2::254]", "fc00::/7 (unique local, RFC 4193)"),
    ] {
        let answer = create(&server.api, &format!("http://{host}/hook?token=s3cret")).await;
        assert_refused(&answer, &[range, "egress.allow"]);
        assert!(!answer.text.contains("s3cret"), "{}", answer.text);
    }
    let here = create(&server.api, "http://127.0.0.1:9/hook").await;
    assert_eq!(here.status, 201, "a server on loopback may call loopback: {}", here.text);
    let id = here.json()["id"].as_str().unwrap().to_owned();
    let update = json!({ "subscriberId": "x", "eventKey": { "eventType": "t" }, "endpoint": "http://10.1.2.3/hook" });
    let path = format!("/api/subscriptions/{id}");
    let json_body = [("content-type", "application/json")];
    let updated = server.api.send("PUT", &path, &json_body, update.to_string()).await.unwrap();
    assert_refused(&updated, &["10.1.2.3", "egress.allow"]);
    let stored = server.api.get(&path).await.unwrap().json();
    assert_eq!(stored["endpoint"], "http://127.0.0.1:9/hook", "nothing was changed");
    server.terminate().await;

    installation.set("EGRESS__ALLOW", r#"["10.1.0.0/16"]"#);
    let server = installation.start().await;
    assert_eq!(create(&server.api, "http://10.1.2.3/other").await.status, 201);
    let updated = server.api.send("PUT", &path, &json_body, update.to_string()).await.unwrap();
    assert_eq!((updated.status, &updated.json()["endpoint"]), (200, &json!("http://10.1.2.3/hook")));
    assert_refused(&create(&server.api, "http://10.2.0.1/hook").await, &["10.0.0.0/8"]);
}

async fn a_stored_endpoint_that_the_server_may_not_call_any_more_fails_permanently(backend: Backend) {
    let mut installation = Installation::on(backend, &[("EGRESS__ALLOW", r#"["10.255.255.0/24"]"#)]).await;
    let server = installation.start().await;
    server.api.subscribe("t", "inside", "http://10.255.255.1:9/hook?token=s3cret").await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("t", "outside", &subscriber.endpoint()).await;
    server.terminate().await;

    installation.set("EGRESS__ALLOW", "[]");
    installation.set("DLT__RETRY_INTERVAL", "100ms");
    let server = installation.start().await;
    let event = server.api.publish("t", "1").await;
    let letter = until("the dead letter", async || {
        let page = server.api.get("/api/dlt-messages?status=FAILED").await.unwrap().json();
        items(&page).first().cloned()
    })
    .await;
    assert_eq!(
        [&letter["messageId"], &letter["subscriberId"], &letter["errorCode"]],
        [event.as_str(), "inside", "egress_denied"]
    );
    let path = format!("/api/dlt-messages/{}", letter["id"].as_str().unwrap());
    let detail = server.api.get(&path).await.unwrap().json();
    let cause = detail["failure"]["cause"].as_str().unwrap();
    assert!(cause.contains("10.255.255.1") && cause.contains("10.0.0.0/8 (private use, RFC 1918)"), "{cause}");
    assert_eq!((&detail["failure"]["attempts"], &detail["retryCount"]), (&json!(1), &json!(0)));
    assert_eq!(detail["history"], Value::Array(Vec::new()), "it is not retried");
    assert!(!detail.to_string().contains("s3cret"));
    assert_eq!(subscriber.wait_for(1).await[0].event_id, event, "other subscribers get the event");
}

#[test]
fn a_bad_range_in_the_configuration_is_a_usage_error() {
    let installation = Installation::new(&[]);
    for (text, why) in [
        ("[egress]\nallow = ['10.1.2.3/8']", "write \"10.0.0.0/8\" for the whole range"),
        ("[egress]\nallow = ['intranet.example']", "\"intranet.example\" is not a range of addresses"),
    ] {
        installation.write_config(text);
        let ran = installation.command(&["serve"]).output().unwrap();
        let stderr = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(why) && stderr.contains("posthaste.toml"), "{stderr}");
    }
}
