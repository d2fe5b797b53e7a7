//! The REST interface of the built-in registry: paths, bodies and error codes of Confluent's.

use hyper::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::Registry;

const A: &str = "syntax = \"proto3\"; message A { string a = 1; }";
const A_AND_B: &str = "syntax = \"proto3\"; message A { string a = 1; int32 b = 2; }";
const CHANGED: &str = "syntax = \"proto3\"; message A { int32 a = 1; }";

fn protobuf(text: &str) -> Option<Value> {
    Some(json!({ "schemaType": "PROTOBUF", "schema": text }))
}

async fn get(registry: &Registry, path: &str) -> Value {
    let (status, body) = registry.send(Method::GET, path, None).await;
    assert_eq!(status, StatusCode::OK, "{path}: {body}");
    body
}

async fn post(registry: &Registry, path: &str, body: Option<Value>) -> Value {
    let (status, body) = registry.send(Method::POST, path, body).await;
    assert_eq!(status, StatusCode::OK, "{path}: {body}");
    body
}

/// The status and the error code of a refused request.
async fn refused(registry: &Registry, method: Method, path: &str, body: Option<Value>) -> (u16, u64) {
    let (status, answer) = registry.send(method, path, body).await;
    assert!(answer["message"].as_str().is_some_and(|message| !message.is_empty()), "{path}: {status} {answer}");
    (status.as_u16(), answer["error_code"].as_u64().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schemas_are_registered_and_found() {
    let registry = Registry::builtin().await;
    let id = post(&registry, "/subjects/a-value/versions?normalize=true", protobuf(A)).await["id"].clone();
    let commented = A.replace("message", "// comment\n message");
    assert_eq!(post(&registry, "/subjects/a-value/versions", protobuf(&commented)).await["id"], id);
    post(&registry, "/subjects/a-value/versions", protobuf(A_AND_B)).await;
    post(&registry, "/subjects/b%2F%C3%BC/versions", protobuf(A)).await;

    assert_eq!(get(&registry, "/subjects").await, json!(["a-value", "b/ü"]));
    assert_eq!(get(&registry, "/subjects?subjectPrefix=b").await, json!(["b/ü"]));
    assert_eq!(get(&registry, "/subjects/a-value/versions").await, json!([1, 2]));
    let first = json!({ "subject": "a-value", "version": 1, "id": id, "schemaType": "PROTOBUF", "schema": A });
    assert_eq!(get(&registry, "/subjects/a-value/versions/1").await, first);
    assert_eq!(get(&registry, "/subjects/a-value/versions/latest").await["version"], 2);
    assert_eq!(get(&registry, "/subjects/a-value").await["version"], 2);
    assert_eq!(get(&registry, "/subjects/a-value/versions/1/schema").await, A);
    assert_eq!(post(&registry, "/subjects/a-value", protobuf(&commented)).await, first);
    let by_id = format!("/schemas/ids/{id}");
    assert_eq!(get(&registry, &by_id).await, json!({ "schemaType": "PROTOBUF", "schema": A }));
    assert_eq!(get(&registry, &format!("{by_id}/subjects")).await, json!(["a-value", "b/ü"]));
    let versions = json!([{ "subject": "a-value", "version": 1 }, { "subject": "b/ü", "version": 1 }]);
    assert_eq!(get(&registry, &format!("{by_id}/versions")).await, versions);
    assert_eq!(get(&registry, "/schemas/types").await, json!(["PROTOBUF"]));

    // The serialized form is the same schema.
    let serialized = get(&registry, &format!("{by_id}?format=serialized&subject=a-value")).await["schema"].clone();
    assert_eq!(post(&registry, "/subjects/c/versions", protobuf(serialized.as_str().unwrap())).await["id"], id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn levels_decide_what_may_be_registered() {
    let registry = Registry::builtin().await;
    assert_eq!(get(&registry, "/config").await, json!({ "compatibilityLevel": "BACKWARD" }));
    post(&registry, "/subjects/a/versions", protobuf(A)).await;
    assert_eq!(refused(&registry, Method::POST, "/subjects/a/versions", protobuf(CHANGED)).await, (409, 409));
    let test = "/compatibility/subjects/a/versions/latest";
    assert_eq!(post(&registry, test, protobuf(CHANGED)).await, json!({ "is_compatible": false }));
    let verbose = post(&registry, &format!("{test}?verbose=true"), protobuf(CHANGED)).await;
    let finding = "FIELD_SCALAR_KIND_CHANGED: field A.a (1) has type int32 and had string";
    assert_eq!(verbose, json!({ "is_compatible": false, "messages": [finding] }));
    assert_eq!(post(&registry, test, protobuf(A_AND_B)).await, json!({ "is_compatible": true }));
    let unknown = "/compatibility/subjects/new/versions";
    assert_eq!(post(&registry, &format!("{unknown}/latest"), protobuf(A)).await, json!({ "is_compatible": true }));
    assert_eq!(refused(&registry, Method::POST, &format!("{unknown}/1"), protobuf(A)).await, (404, 40401));

    assert_eq!(refused(&registry, Method::GET, "/config/a", None).await, (404, 40408));
    assert_eq!(get(&registry, "/config/a?defaultToGlobal=true").await, json!({ "compatibilityLevel": "BACKWARD" }));
    let none = Some(json!({ "compatibility": "none" }));
    let set = registry.send(Method::PUT, "/config/a", none).await;
    assert_eq!(set, (StatusCode::OK, json!({ "compatibility": "NONE" })));
    assert_eq!(get(&registry, "/config/a").await, json!({ "compatibilityLevel": "NONE" }));
    post(&registry, "/subjects/a/versions", protobuf(CHANGED)).await;
    let removed = registry.send(Method::DELETE, "/config/a", None).await;
    assert_eq!(removed, (StatusCode::OK, json!({ "compatibilityLevel": "NONE" })));
    assert_eq!(refused(&registry, Method::DELETE, "/config/a", None).await, (404, 40408));
    let full = Some(json!({ "compatibility": "FULL" }));
    assert_eq!(registry.send(Method::PUT, "/config", full).await.0, StatusCode::OK);
    assert_eq!(get(&registry, "/config").await, json!({ "compatibilityLevel": "FULL" }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_are_deleted_in_two_steps() {
    let registry = Registry::builtin().await;
    for text in [A, A_AND_B] {
        post(&registry, "/subjects/a/versions", protobuf(text)).await;
    }
    let delete = async |path: &str| registry.send(Method::DELETE, path, None).await;
    let fails = async |path: &str| refused(&registry, Method::DELETE, path, None).await;
    assert_eq!(fails("/subjects/a/versions/1?permanent=true").await, (404, 40407));
    assert_eq!(delete("/subjects/a/versions/1").await, (StatusCode::OK, json!(1)));
    assert_eq!(fails("/subjects/a/versions/1").await, (404, 40406));
    assert_eq!(get(&registry, "/subjects/a/versions").await, json!([2]));
    assert_eq!(get(&registry, "/subjects/a/versions?deleted=true").await, json!([1, 2]));
    assert_eq!(refused(&registry, Method::GET, "/subjects/a/versions/1", None).await, (404, 40402));
    assert_eq!(get(&registry, "/subjects/a/versions/1?deleted=true").await["schema"], A);
    assert_eq!(delete("/subjects/a/versions/1?permanent=true").await, (StatusCode::OK, json!(1)));
    assert_eq!(fails("/subjects/a?permanent=true").await, (404, 40405));
    assert_eq!(delete("/subjects/a").await, (StatusCode::OK, json!([2])));
    assert_eq!(fails("/subjects/a").await, (404, 40404));
    assert_eq!(get(&registry, "/subjects").await, json!([]));
    assert_eq!(get(&registry, "/subjects?deleted=true").await, json!(["a"]));
    assert_eq!(delete("/subjects/a?permanent=true").await, (StatusCode::OK, json!([2])));
    assert_eq!(fails("/subjects/a?permanent=true").await, (404, 40401));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_that_others_import_is_not_deleted() {
    let registry = Registry::builtin().await;
    post(&registry, "/subjects/money/versions", protobuf("syntax = \"proto3\"; message Money {}")).await;
    let order = |version: i32| {
        let text = "syntax = \"proto3\"; import \"money.proto\"; message Order { Money total = 1; }";
        let references = json!([{ "name": "money.proto", "subject": "money", "version": version }]);
        Some(json!({ "schemaType": "PROTOBUF", "schema": text, "references": references, "metadata": null }))
    };
    assert_eq!(refused(&registry, Method::POST, "/subjects/order/versions", order(2)).await, (422, 42201));
    let id = post(&registry, "/subjects/order/versions", order(1)).await["id"].clone();
    assert_eq!(get(&registry, "/subjects/money/versions/1/referencedby").await, json!([id]));
    assert_eq!(refused(&registry, Method::DELETE, "/subjects/money/versions/1", None).await, (422, 42206));
    assert_eq!(refused(&registry, Method::DELETE, "/subjects/money", None).await, (422, 42206));
    assert_eq!(registry.send(Method::DELETE, "/subjects/order", None).await.0, StatusCode::OK);
    assert_eq!(registry.send(Method::DELETE, "/subjects/money", None).await.0, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_requests_are_answered_with_confluents_codes() {
    let registry = Registry::builtin().await;
    post(&registry, "/subjects/a/versions", protobuf(A)).await;
    let long = format!("/subjects/{}/versions", "x".repeat(256));
    let avro = Some(json!({ "schema": "\"string\"" }));
    let cases = [
        (Method::GET, "/subjects/b/versions", None, (404, 40401)),
        (Method::GET, "/subjects/a/versions/7", None, (404, 40402)),
        (Method::GET, "/schemas/ids/777", None, (404, 40403)),
        (Method::GET, "/schemas/ids/x", None, (404, 40403)),
        (Method::POST, "/subjects/a", protobuf(A_AND_B), (404, 40403)),
        (Method::GET, "/subjects/a/versions/0", None, (422, 42202)),
        (Method::GET, "/subjects/a/versions/x", None, (422, 42202)),
        (Method::POST, "/subjects/a/versions", protobuf("message {"), (422, 42201)),
        (Method::POST, "/subjects/a/versions", protobuf("message A {} // \0"), (422, 42201)),
        (Method::POST, "/subjects/a/versions", avro, (422, 42201)),
        (Method::PUT, "/config/a", Some(json!({ "compatibility": "SOME" })), (422, 42203)),
        (Method::POST, &long, protobuf(A), (422, 42208)),
        (Method::POST, "/subjects/a/versions", Some(json!({ "text": 1 })), (400, 400)),
        (Method::GET, "/nothing", None, (404, 404)),
        (Method::PUT, "/subjects", None, (405, 405)),
    ];
    for (method, path, body, expected) in cases {
        assert_eq!(refused(&registry, method, path, body).await, expected, "{path}");
    }
    let large = json!({ "schemaType": "PROTOBUF", "schema": "x".repeat(5 * 1024 * 1024) });
    assert_eq!(refused(&registry, Method::POST, "/subjects/a/versions", Some(large)).await, (413, 413));
    let long = json!({ "schemaType": "PROTOBUF", "schema": "x".repeat(1024 * 1024 + 1) });
    assert_eq!(refused(&registry, Method::POST, "/subjects/a/versions", Some(long)).await, (422, 42201));
    for content_type in ["application/vnd.schemaregistry.v1+json", "application/octet-stream"] {
        let body = protobuf(A).unwrap().to_string();
        let sent = registry.send_text(Method::POST, "/subjects/a/versions", content_type, body).await;
        assert_eq!(sent.0, StatusCode::OK, "{content_type}: {}", sent.1);
    }
    let html = registry.send_text(Method::POST, "/subjects/a/versions", "text/html", String::new()).await;
    assert_eq!(html.0, StatusCode::UNSUPPORTED_MEDIA_TYPE);
}
