//! Confluent's client for Python reads what we write, and we read what it writes.

use std::process::Stdio;
use std::sync::Arc;

use bytes::Bytes;
use posthaste_api::proto::{EventHubEvent, Header, event_hub_event::Event};
use posthaste_backend_tests::servers;
use posthaste_schema::{Framer, Imports, ParsedSchema, framing};
use prost::Message as _;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::support::{Registry, events};

const MESSAGE: &str = "posthaste.v1.EventHubEvent";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_are_exchanged_through_apicurio_registry() {
    // Confluent's client asks for `?format=serialized`, which this registry does not know: it returns the text that we
    // registered. So the client reads our message without a look-up.
    exchange(Registry::apicurio().await, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_are_exchanged_through_the_built_in_registry() {
    exchange(Registry::builtin().await, true).await;
}

fn event() -> EventHubEvent {
    EventHubEvent {
        event_id: "e-1".to_owned(),
        event_type: "order.placed".to_owned(),
        source_service: "shop".to_owned(),
        created_at: Some(posthaste_api::proto::timestamp(chrono::DateTime::from_timestamp(1_700_000_000, 0).unwrap())),
        tenant_id: Some(String::new()),
        headers: vec![Header { name: "a".to_owned(), value: "ü".to_owned() }],
        event: Some(Event::JsonText("{\"total\": 7}".to_owned())),
        ..EventHubEvent::default()
    }
}

fn event_as_json() -> Value {
    json!({
        "eventId": "e-1",
        "eventType": "order.placed",
        "sourceService": "shop",
        "createdAt": "2023-11-14T22:13:20Z",
        "tenantId": "",
        "headers": [{ "name": "a", "value": "ü" }],
        "jsonText": "{\"total\": 7}",
    })
}

/// `looks_up` says if the registry can serialize the schema that we registered.
async fn exchange(registry: Registry, looks_up: bool) {
    let framer = Framer::new(Arc::new(registry.client()), events()).unwrap();
    // Python registers first on one topic, we do on the other.
    let theirs = registry.subject("theirs");
    let answer = run(&registry, &theirs, json!({ "json": event_as_json() })).await;
    let value = Bytes::from(from_hex(&answer["value"]));
    let frame = framing::decode(&value).unwrap();
    assert_eq!((&frame.indexes[..], &frame.message[..]), (&[0][..], &from_hex(&answer["bytes"])[..]));
    let message = framer.decode(&value, MESSAGE).await.unwrap();
    assert_eq!(EventHubEvent::decode(message).unwrap(), event());

    let ours = registry.subject("ours");
    let value = framer.encode(&ours, MESSAGE, &event().encode_to_vec()).await.unwrap();
    let answer = run(&registry, &ours, json!({ "value": hex(&value), "looks_up": looks_up })).await;
    assert_eq!(answer["json"], event_as_json());
    // Python reads its own message, too: the schema that it registered means the same.
    let own = framing::encode(frame.schema_id, &frame.indexes, &frame.message);
    let own = run(&registry, &theirs, json!({ "value": hex(&own), "looks_up": true })).await;
    assert_eq!(own["json"], event_as_json());
}

/// Runs the script with an order, and returns what it answers.
async fn run(registry: &Registry, topic: &str, mut order: Value) -> Value {
    let schema = ParsedSchema::parse(events(), &Imports::new()).unwrap();
    order["url"] = json!(registry.url);
    order["topic"] = json!(topic);
    order["descriptor"] = json!(schema.serialized());
    order["message"] = json!(MESSAGE);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/schema_registry/confluent_client.py");
    let mut python = Command::new(servers::confluent_python())
        .arg(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    python.stdin.take().unwrap().write_all(order.to_string().as_bytes()).await.unwrap();
    let output = python.wait_with_output().await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &Value) -> Vec<u8> {
    let text = text.as_str().unwrap();
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}
