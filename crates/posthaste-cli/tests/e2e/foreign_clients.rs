//! Other clients of Kafka and of the Schema Registry read what the server writes, and write what it reads.

use std::io::Write;
use std::process::{Command, Stdio};

use posthaste_backend_tests::servers;
use posthaste_schema::{Imports, ParsedSchema, SchemaText};
use serde_json::{Value, json};

use crate::process::{Installation, Server, items, until};
use crate::subscriber::Subscriber;

/// A server on Kafka, with one event that was delivered.
struct Scene {
    installation: Installation,
    server: Server,
    subscriber: Subscriber,
    broker: String,
    topic: String,
    event_id: String,
}

/// `registry` is the URL of the Schema Registry; `None` for the built-in one.
async fn scene(registry: Option<&str>) -> Scene {
    let (broker, prefix) = servers::kafka().await;
    let mut installation = Installation::new(&[]);
    installation.use_kafka(&broker, prefix.trim_end_matches('.'));
    registry.into_iter().for_each(|url| installation.set("REGISTRY__URL", url));
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let event_id = server.api.publish("order.placed", "{\"total\": 7}").await;
    subscriber.wait_for(1).await;
    Scene { installation, server, subscriber, broker, topic: format!("{prefix}events.order.placed"), event_id }
}

/// Runs a program with this input, and returns what it prints.
fn run(mut program: Command, input: &[u8]) -> String {
    let piped = program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running =
        piped.spawn().unwrap_or_else(|error| panic!("{program:?}: {error}: run ./test, which installs it"));
    running.stdin.take().unwrap().write_all(input).unwrap();
    let ran = running.wait_with_output().unwrap();
    assert!(ran.status.success(), "{program:?}: {}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8_lossy(&ran.stdout).into_owned()
}

fn kcat(scene: &Scene, arguments: &[&str], input: &[u8]) -> String {
    let mut kcat = Command::new("kcat");
    kcat.args(["-q", "-b", &scene.broker, "-t", &scene.topic]).args(arguments);
    run(kcat, input)
}

#[tokio::test(flavor = "multi_thread")]
async fn kcat_reads_plain_records_and_a_plain_record_of_kcat_is_quarantined() {
    let scene = scene(None).await;
    let read = kcat(&scene, &["-C", "-o", "beginning", "-e", "-f", "%k %S\n"], b"");
    let (key, size) = read.trim_end().split_once(' ').unwrap();
    assert!(key == scene.event_id && size.parse::<usize>().is_ok_and(|size| size > 20), "{read}");

    kcat(&scene, &["-P", "-k", "foreign", "-H", "a=b"], b"junk");
    let page = until("the record is quarantined", async || {
        let page = scene.server.api.get("/api/quarantine").await.unwrap().json();
        (items(&page).len() == 1).then_some(page)
    })
    .await;
    let record = &items(&page)[0];
    assert_eq!((&record["topic"], &record["key"]), (&json!(scene.topic), &json!("foreign")));
    assert!(record["reason"].as_str().unwrap().starts_with("the value is not framed"), "{record}");
    let id = scene.server.api.publish("order.placed", "2").await;
    assert_eq!(scene.subscriber.wait_for(2).await[1].event_id, id, "the stream goes on");
    assert!(scene.server.terminate().await.success(), "{}", scene.installation.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn confluents_python_client_shares_a_topic_by_the_built_in_registry() {
    let scene = scene(None).await;
    let registry = format!("{}/registry", scene.installation.api().url());
    share_with_python(scene, &registry, true).await;
}

/// Confluent's client asks for `?format=serialized`, which this registry does not know, so it reads without a look-up.
#[tokio::test(flavor = "multi_thread")]
async fn confluents_python_client_shares_a_topic_by_apicurio_registry() {
    let (registry, _) = servers::apicurio().await;
    share_with_python(scene(Some(&registry)).await, &registry, false).await;
}

async fn share_with_python(scene: Scene, registry: &str, looks_up: bool) {
    let schema = SchemaText { text: posthaste_api::EVENTS_PROTO.to_owned(), references: Vec::new() };
    let schema = ParsedSchema::parse(schema, &Imports::new()).unwrap();
    let order = json!({
        "broker": scene.broker,
        "topic": scene.topic,
        "registry": registry,
        "looks_up": looks_up,
        "descriptor": schema.serialized(),
        "event": {
            "eventId": "from-python",
            "eventType": "order.placed",
            "sourceService": "python",
            "jsonText": "{\"from\": \"python\"}",
        },
    });
    let mut python = Command::new(servers::confluent_python());
    python.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2e/foreign_client.py"));
    let read: Value = serde_json::from_str(&run(python, order.to_string().as_bytes())).unwrap();
    assert_eq!((&read["key"], &read["event"]["eventId"]), (&json!(scene.event_id), &json!(scene.event_id)));
    assert_eq!(read["event"]["jsonText"], "{\"total\": 7}");

    let arrivals = scene.subscriber.wait_for(2).await;
    assert_eq!(arrivals[1].event_id, "from-python");
    assert_eq!(&arrivals[1].body[..], b"{\"from\": \"python\"}");
    let page = scene.server.api.get("/api/quarantine").await.unwrap().json();
    assert!(items(&page).is_empty(), "{page}");
    assert!(scene.server.terminate().await.success(), "{}", scene.installation.log());
}
