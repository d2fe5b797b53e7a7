//! Channels: from the outbox tables to the topics.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::process::Command;

use posthaste_backend_tests::servers::{self, Kafka};
use serde_json::{Value, json};

use crate::api::Api;
use crate::process::{Backend, Installation, Server, items, on_each_backend, until};
use crate::subscriber::{Arrival, Subscriber};

on_each_backend! {
    events_of_a_paused_channel_wait_until_it_is_resumed
    a_channel_of_the_configuration_has_its_own_topic_and_may_be_disabled
}

fn printed(installation: &Installation, arguments: &[&str]) -> String {
    let ran = installation.command(arguments).output().expect("posthaste runs");
    assert!(ran.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8_lossy(&ran.stdout).into_owned()
}

/// The status of each channel.
async fn statuses(api: &Api) -> HashMap<String, Value> {
    let list = api.get("/api/channels").await.unwrap().json();
    items(&list).iter().map(|item| (item["eventType"].as_str().expect("a type").to_owned(), item.clone())).collect()
}

async fn outbox_status(api: &Api, id: &str) -> Value {
    api.get(&format!("/api/events/{id}")).await.unwrap().json()["outbox"]["status"].clone()
}

async fn events_of_a_paused_channel_wait_until_it_is_resumed(backend: Backend) {
    let installation = Installation::on(backend, &[]).await;
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    for event_type in ["order.placed", "order.paid"] {
        server.api.subscribe(event_type, "billing", &subscriber.endpoint()).await;
    }
    let unknown = server.api.post("/api/channels/order.placed/pause", "").await.unwrap();
    assert_eq!((unknown.status, unknown.code().as_str()), (404, "not_found"));
    server.api.publish("order.placed", "1").await;
    subscriber.wait_for(1).await;

    let paused = printed(&installation, &["channels", "pause", "order.placed"]);
    assert!(paused.contains("paused"), "{paused}");
    let waiting = server.api.publish("order.placed", "2").await;
    server.api.publish("order.paid", "3").await;
    assert_eq!(&subscriber.wait_for(2).await[1].body[..], b"3");
    // It stays paused after a restart, where every channel is opened anew.
    assert!(server.terminate().await.success());
    let server = installation.start().await;
    server.api.publish("order.paid", "4").await;
    assert_eq!(&subscriber.wait_for(3).await[2].body[..], b"4");
    assert_eq!(outbox_status(&server.api, &waiting).await, "NEW");
    assert_eq!(statuses(&server.api).await["order.placed"]["status"], "paused");
    assert_eq!(server.api.get("/readyz").await.unwrap().json()["status"], "ready", "an operator paused it");

    let resumed = server.api.post("/api/channels/order.placed/resume", "").await.unwrap().json();
    assert_eq!(resumed["status"], "running", "{resumed}");
    assert_eq!(&subscriber.wait_for(4).await[3].body[..], b"2");
    assert!(server.terminate().await.success());
}

async fn a_channel_of_the_configuration_has_its_own_topic_and_may_be_disabled(backend: Backend) {
    let installation = Installation::on(backend, &[]).await;
    // Topics on Kafka are shared with other tests.
    let topic = format!("orders-{}", installation.port());
    installation.write_config(&format!(
        "[[channels]]\nevent_type = 'order.placed'\ntopic = '{topic}'\nbatch_size = 7\ninterval = '50ms'\n\
         [[channels]]\nevent_type = 'order.kept'\nenabled = false\n\
         [[channels]]\nevent_type = 'order.late'\nstart_delay = '1s'\n"
    ));
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    for event_type in ["order.placed", "order.kept", "order.late"] {
        server.api.subscribe(event_type, "billing", &subscriber.endpoint()).await;
    }
    let kept = server.api.publish("order.kept", "0").await;
    server.api.publish("order.late", "1").await;
    server.api.publish("order.placed", "2").await;
    let arrivals = subscriber.wait_for(2).await;
    let bodies: HashSet<&[u8]> = arrivals.iter().map(|arrival| &arrival.body[..]).collect();
    assert_eq!(bodies, HashSet::from([&b"1"[..], b"2"]));
    assert_eq!(outbox_status(&server.api, &kept).await, "NEW");
    let found = statuses(&server.api).await;
    assert_eq!((&found["order.placed"]["topic"], &found["order.kept"]["status"]), (&json!(topic), &json!("disabled")));
    let topics = server.api.get("/api/topics").await.unwrap().json();
    assert!(items(&topics).iter().any(|item| item["topic"] == topic.as_str()), "{topics}");
    assert!(server.terminate().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_channel_paused_at_one_server_is_paused_at_the_others() {
    let installation = Installation::on(Backend::Postgres, &[]).await;
    let replica = installation.replica();
    let (one, other) = tokio::join!(installation.start(), replica.start());
    let subscriber = Subscriber::start().await;
    for event_type in ["order.placed", "order.paid"] {
        one.api.subscribe(event_type, "billing", &subscriber.endpoint()).await;
    }
    let arrives = async |id: &str| {
        let is_there = |arrivals: &[Arrival]| arrivals.iter().any(|arrival| arrival.event_id == id);
        subscriber.wait_until("an event", is_there).await;
    };
    arrives(&one.api.publish("order.placed", "1").await).await;
    one.api.post("/api/channels/order.placed/pause", "").await.unwrap();
    // The other server looks which channels are paused every two seconds. Until then it publishes what it accepts.
    let held = until("the other server holds events back", async || {
        let id = other.api.publish("order.placed", "2").await;
        for _ in 0..10 {
            arrives(&other.api.publish("order.paid", "{}").await).await;
        }
        (outbox_status(&other.api, &id).await == "NEW").then_some(id)
    })
    .await;
    other.api.post("/api/channels/order.placed/resume", "").await.unwrap();
    arrives(&held).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_channel_with_a_bus_of_its_own_exports_its_events() {
    let (broker, prefix) = servers::kafka().await;
    let installation = Installation::new(&[]);
    let topic = format!("{prefix}exported");
    installation.write_config(&format!(
        "[bus]\nreplication = 1\n[[channels]]\nevent_type = 'order.placed'\ntopic = '{topic}'\nacks = '1'\n\
         bus_url = 'kafka://{broker}'\nregistry_url = '{}'\n",
        servers::apicurio().await.0
    ));
    let server = installation.start().await;
    let id = server.api.publish("order.placed", "{}").await;
    until("the event is published", async || (outbox_status(&server.api, &id).await == "PROCESSED").then_some(()))
        .await;
    let arguments = ["-q", "-b", &broker, "-t", &topic, "-C", "-o", "beginning", "-e", "-f", "%k\n"];
    let read = Command::new("kcat").args(arguments).output().expect("kcat is installed: ./test does it");
    assert_eq!(String::from_utf8_lossy(&read.stdout).trim(), id);
    let topics = server.api.get("/api/topics").await.unwrap().json();
    assert!(!items(&topics).iter().any(|item| item["topic"].as_str().is_some_and(|name| name.contains("order"))));
    assert!(server.terminate().await.success());
}

/// While the broker is away, a channel tries one event from time to time. The others are not touched.
#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_the_broker_costs_no_attempt_and_changes_few_rows() {
    const EVENTS: usize = 3_000;
    let mut kafka = Kafka::start().await;
    let mut installation = Installation::on(Backend::Postgres, &[("OUTBOX__BATCH_SIZE", "100")]).await;
    installation.use_kafka(kafka.url(), "outage");
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    server.api.publish("order.placed", "{}").await;
    subscriber.wait_for(1).await;
    kafka.stop().await;
    installation.execute(&format!(
        "INSERT INTO outbox_event (event_type, payload) SELECT 'order.placed', '{{}}' FROM generate_series(1, {EVENTS})"
    ));
    let failing = until("the channel fails", async || {
        let channel = statuses(&server.api).await["order.placed"].clone();
        (channel["status"] == "failing").then_some(channel)
    })
    .await;
    assert!(failing["lastError"].as_str().is_some_and(|error| error.contains("Kafka")), "{failing}");
    let count = |condition: &str| -> usize {
        let counted = installation.execute(&format!("SELECT count(*) FROM outbox_event WHERE {condition}"));
        counted.trim().parse().expect("a number")
    };
    until("an event is tried again", async || (count("last_error IS NOT NULL") > 0).then_some(())).await;
    // Two batches may be in flight when the broker goes away, and one event follows at a time.
    assert!(count("last_error IS NOT NULL") < 300, "{}", count("last_error IS NOT NULL"));
    assert_eq!(count("attempts > 0"), 0);
    kafka.start_again().await;
    subscriber.wait_for(EVENTS + 1).await;
    until("the channel runs", async || {
        (statuses(&server.api).await["order.placed"]["status"] == "running").then_some(())
    })
    .await;
    assert_eq!((count("attempts > 0"), count("status = 3")), (0, 0));
}

/// The keys of an aggregate in the order of their records, by aggregate, each key once.
fn order_in_topics(installation: &Installation, api: &Api, prefix: &str) -> BTreeMap<(String, String), Vec<u64>> {
    let mut seen: BTreeMap<(String, String), Vec<u64>> = BTreeMap::new();
    for event_type in TYPES {
        let topic = format!("{prefix}.events.{event_type}");
        let url = api.url();
        let arguments = ["--server", &url, "topics", "tail", &topic];
        for line in printed(installation, &arguments).lines() {
            let record: Value = serde_json::from_str(line).expect("a record");
            let event = &record["value"];
            let number = event["payload"]["number"].as_u64().unwrap_or_else(|| panic!("a number: {record}"));
            let aggregate = event["aggregateId"].as_str().unwrap_or_else(|| panic!("an aggregate: {record}"));
            let numbers = seen.entry((event_type.to_owned(), aggregate.to_owned())).or_default();
            if !numbers.contains(&number) {
                numbers.push(number);
            }
        }
    }
    seen
}

const TYPES: [&str; 2] = ["order.placed", "order.paid"];
const AGGREGATES: u64 = 20;

/// Two servers read an ordered table. One of them is killed, paused and started again, and the broker's connections are
/// cut, while events are written. Each topic has the events of an aggregate in the order in which they were written.
#[tokio::test(flavor = "multi_thread")]
async fn the_order_of_an_aggregate_survives_retries_and_kills() {
    const ROUNDS: u64 = 12;
    const PER_ROUND: u64 = 200;
    let (_kafka, way) = Kafka::start_behind_proxy().await;
    let source = servers::postgres().await;
    let settings = [("OUTBOX__LEASE", "3s"), ("OUTBOX__ORDERED", "true"), ("OUTBOX__BATCH_SIZE", "50")];
    let mut installation = Installation::on(Backend::Postgres, &settings).await;
    installation.use_kafka(way.url().trim_start_matches("kafka://"), "ordered");
    let replica = installation.replica();
    let config = format!("[[sources]]\nname = 'shop'\nurl = '{source}'\nmode = 'ordered'\n");
    installation.write_config(&config);
    replica.write_config(&config);
    printed(&installation, &["sources", "migrate", "shop"]);
    let (mut one, other) = tokio::join!(installation.start(), replica.start());
    for round in 0..ROUNDS {
        // The first half of the aggregates is in the table of the servers, the second in that of the service.
        let insert = |aggregates: &str| {
            let (from, to) = (round * PER_ROUND, (round + 1) * PER_ROUND - 1);
            format!(
                "INSERT INTO outbox_event (event_type, aggregate_type, aggregate_id, payload)
                 SELECT CASE WHEN n / {AGGREGATES} % 3 = 0 THEN 'order.paid' ELSE 'order.placed' END, 'order',
                     n % {AGGREGATES}, json_build_object('number', n)
                 FROM generate_series({from}, {to}) AS n WHERE n % {AGGREGATES} {aggregates} {} ORDER BY n",
                AGGREGATES / 2
            )
        };
        installation.execute(&insert("<"));
        installation.execute_on(&source, &insert(">="));
        match round % 4 {
            1 => way.cut_all().await,
            2 => {
                one.kill();
                one = installation.start().await;
            }
            3 => one.pause_for(std::time::Duration::from_secs(4)).await,
            _ => {}
        }
    }
    let is_done = "SELECT count(*) FROM outbox_event WHERE status <> 1";
    until("every event is published", async || {
        let left = [installation.execute(is_done), installation.execute_on(&source, is_done)];
        left.iter().all(|left| left.trim() == "0").then_some(())
    })
    .await;
    let seen = order_in_topics(&installation, &other.api, "ordered");
    let total: usize = seen.values().map(Vec::len).sum();
    assert_eq!(total as u64, ROUNDS * PER_ROUND, "every event is there");
    for (aggregate, numbers) in &seen {
        assert!(numbers.is_sorted(), "{aggregate:?}: {numbers:?}");
    }
    drop::<Server>(one);
}
