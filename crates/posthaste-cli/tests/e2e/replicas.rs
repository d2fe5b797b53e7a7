//! Several servers on one PostgreSQL database.

use std::collections::HashSet;

use axum::http::StatusCode;
use serde_json::json;

use crate::api::Api;
use crate::crash::SETTLED;
use crate::process::{Backend, Installation, items, until};
use crate::subscriber::{Arrival, Subscriber};

/// How many events each of the two writers publishes before the kill and across it.
const EVENTS: usize = 500;
const BATCH: usize = TYPES;
/// Each event type has its own subscription. All deliveries of a subscription are in one partition, which one server
/// reads, so there are enough of them for two servers.
pub const TYPES: usize = 24;

/// The events that only the outbox processor has to do with, each with the consumer that reads the partition of its
/// delivery. If that consumer does not crash, the event is delivered once.
const WITH_CONSUMER: &str = "SELECT event_id || ' ' || progress.owner FROM outbox_event
    JOIN log_record record ON record.key = event_id
    JOIN log_partition place ON place.id = record.partition_id AND place.topic LIKE 'posthaste.outbox.%'
    JOIN log_group progress ON progress.partition_id = place.id AND progress.owner IS NOT NULL
    WHERE outbox_event.status = 1
      AND NOT EXISTS (SELECT 1 FROM dlt_event WHERE dlt_event.event_id = outbox_event.event_id)
      AND NOT EXISTS (
          SELECT 1 FROM log_record record JOIN log_partition place ON place.id = record.partition_id
          LEFT JOIN log_group progress ON progress.partition_id = place.id
          WHERE record.key = outbox_event.event_id AND place.topic LIKE 'posthaste.events.%'
            AND record.\"offset\" >= coalesce(progress.watermark, 0))";

/// The consumers that read the partitions of these deliveries.
const CONSUMERS: &str = "SELECT DISTINCT owner FROM log_group JOIN log_partition ON id = partition_id
    WHERE topic = 'posthaste.outbox.organization' AND owner IS NOT NULL";

pub fn event_type(place: usize) -> String {
    format!("order.placed-{}", place % TYPES)
}

/// Publishes events through one server. If it does not answer, sends the same batch to the other one, as a load balancer
/// would.
async fn publish(server: Api, other: Api, name: &'static str) -> Vec<String> {
    let ids: Vec<String> = (0..EVENTS).map(|number| format!("{name}-{number}")).collect();
    for batch in ids.chunks(BATCH) {
        let event = |(place, id): (usize, &String)| json!({ "eventId": id, "eventType": event_type(place), "sourceService": "e2e", "payload": id });
        let body = json!(batch.iter().enumerate().map(event).collect::<Vec<_>>()).to_string();
        let answer = match server.post("/api/events/batch", body.clone()).await {
            Ok(answer) if answer.status == 202 => answer,
            _ => other.post("/api/events/batch", body).await.unwrap(),
        };
        assert_eq!(answer.status, 202, "{}", answer.text);
        let results = answer.json();
        let is_stored = |result: &serde_json::Value| result["eventId"].is_string();
        assert!(results["results"].as_array().unwrap().iter().all(is_stored), "{results}");
    }
    ids
}

pub async fn wait_for_every(ids: &HashSet<String>, subscriber: &Subscriber) {
    let have_all_arrived = |arrivals: &[Arrival]| {
        let arrived: HashSet<&str> = arrivals.iter().map(|arrival| arrival.event_id.as_str()).collect();
        arrivals.len() >= ids.len() && ids.iter().all(|id| arrived.contains(id.as_str()))
    };
    subscriber.wait_until("every event", have_all_arrived).await;
}

pub async fn wait_until_all_is_acked(api: &Api) {
    wait_until_acked(api, |_| true).await;
}

/// Waits until the groups have done all records of these topics.
pub async fn wait_until_acked(api: &Api, is_wanted: impl Fn(&str) -> bool) {
    until("the groups have done everything", async || {
        let topics = api.get("/api/topics").await.ok()?.json();
        let topics =
            topics["items"].as_array()?.iter().filter(|topic| is_wanted(topic["topic"].as_str().expect("a name")));
        let mut groups = topics.flat_map(|topic| {
            let partitions = topic["partitions"].as_array().expect("partitions").iter();
            partitions.flat_map(|partition| partition["groups"].as_array().expect("groups").iter())
        });
        groups.all(|group| group["lag"] == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_event_is_lost_when_one_of_two_servers_is_killed() {
    let installation =
        Installation::on(Backend::Postgres, &[("OUTBOX__LEASE", "5s"), ("DELIVERY__CONCURRENCY", "16")]).await;
    let replica = installation.replica();
    let (killed, surviving) = tokio::join!(installation.start(), replica.start());
    let subscriber = Subscriber::start().await;
    for place in 0..TYPES {
        killed.api.subscribe(&event_type(place), "billing", &subscriber.endpoint()).await;
    }
    let (one, other) = tokio::join!(
        publish(installation.api(), replica.api(), "early-a"),
        publish(replica.api(), installation.api(), "early-b"),
    );
    let mut ids: HashSet<String> = one.into_iter().chain(other).collect();
    wait_for_every(&ids, &subscriber).await;
    wait_until_all_is_acked(&surviving.api).await;
    assert_eq!(subscriber.arrivals().len(), 2 * EVENTS, "nothing is delivered twice without a crash");

    until("both servers read partitions", async || {
        (installation.execute(CONSUMERS).lines().count() == 2).then_some(())
    })
    .await;
    subscriber.hang();
    let one = tokio::spawn(publish(installation.api(), replica.api(), "late-a"));
    let other = tokio::spawn(publish(replica.api(), installation.api(), "late-b"));
    until("the servers have many requests in flight", async || (subscriber.open_requests() > 10 * TYPES).then_some(()))
        .await;
    killed.kill();
    // A delivery is settled only after its response, so no request of a settled delivery is still on its way.
    let settled: HashSet<String> = installation.execute(SETTLED).lines().map(str::to_owned).collect();
    let arrived = subscriber.arrivals().len();
    assert_eq!(settled.len(), 2 * EVENTS);
    let with_consumer = installation.execute(WITH_CONSUMER);
    subscriber.recover();
    ids.extend(one.await.unwrap());
    ids.extend(other.await.unwrap());
    assert_eq!(ids.len(), 4 * EVENTS);
    wait_for_every(&ids, &subscriber).await;

    wait_until_all_is_acked(&surviving.api).await;
    let survivor = until("one server reads all partitions", async || {
        let consumers = installation.execute(CONSUMERS);
        (consumers.lines().count() == 1).then(|| consumers.trim().to_owned())
    })
    .await;
    // Deliveries for which a server had no room while the subscriber hung became dead letters, and were sent afterwards.
    until("no dead letter is left", async || {
        for status in ["NEW", "FAILED"] {
            let path = format!("/api/dlt-messages?status={status}");
            if surviving.api.get(&path).await.unwrap().json()["total"] != 0 {
                return None;
            }
        }
        Some(())
    })
    .await;
    assert!(surviving.terminate().await.success(), "{}", replica.log());
    let arrivals = subscriber.arrivals();
    let again = arrivals[arrived..].iter().find(|arrival| settled.contains(&arrival.event_id));
    assert!(again.is_none(), "{} was delivered again after it was settled", again.unwrap().event_id);
    let counts = subscriber.counts();
    let owned = || with_consumer.lines().filter_map(|line| line.split_once(' '));
    let of_survivor: Vec<&str> = owned().filter(|(_, owner)| *owner == survivor).map(|(id, _)| id).collect();
    assert!(!of_survivor.is_empty() && of_survivor.len() < owned().count(), "both servers had deliveries");
    let twice: Vec<&&str> = of_survivor.iter().filter(|id| counts[**id] > 1).collect();
    assert!(twice.is_empty(), "delivered twice by the server that was not killed: {twice:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_server_changes_another_sees_at_once() {
    let settings = [("DELIVERY__MAX_RETRY", "0"), ("DLT__MAX_RETRY", "0")];
    let installation = Installation::on(Backend::Postgres, &settings).await;
    let replica = installation.replica();
    let (one, other) = tokio::join!(installation.start(), replica.start());
    let (first, second) = (Subscriber::start().await, Subscriber::start().await);
    one.api.subscribe("order.placed", "billing", &first.endpoint()).await;
    let id = other.api.publish("order.placed", "1").await;
    assert_eq!(first.wait_for(1).await[0].event_id, id);
    // Both have loaded the first subscription. An event that is accepted after the second one exists reaches it.
    other.api.subscribe("order.paid", "audit", &second.endpoint()).await;
    let id = one.api.publish("order.paid", "2").await;
    assert_eq!(second.wait_for(1).await[0].event_id, id);

    second.answer(StatusCode::BAD_GATEWAY);
    one.api.publish("order.paid", "3").await;
    let dead_letter = until("the dead letter", async || {
        let page = other.api.get("/api/dlt-messages?status=ALL").await.unwrap().json();
        items(&page).first().cloned()
    })
    .await;
    second.answer(StatusCode::OK);
    for server in [&one, &other] {
        let replay = json!({ "ids": [dead_letter["id"]] }).to_string();
        let replayed = server.api.post("/api/replay?wait=30", replay).await.unwrap().json();
        let expected = if std::ptr::eq(server, &one) { 1 } else { 0 };
        assert_eq!(replayed["matched"], expected, "{replayed}");
    }
    // The same event through both servers is stored once.
    let event = r#"{"eventId":"same","eventType":"order.placed","sourceService":"s","payload":4}"#;
    let (stored, known) = tokio::join!(one.api.post("/api/events", event), other.api.post("/api/events", event));
    let statuses = HashSet::from([stored.unwrap().status, known.unwrap().status]);
    assert_eq!(statuses, HashSet::from([202, 200]));
    assert!(one.terminate().await.success() && other.terminate().await.success(), "{}", installation.log());
}
