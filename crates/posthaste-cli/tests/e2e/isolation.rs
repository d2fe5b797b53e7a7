//! Bad endpoints do not slow good ones: who is served, in what order, and what is stored.

use std::collections::HashSet;
use std::time::Duration;

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::api::Api;
use crate::process::{Installation, Server, until};
use crate::subscriber::{Arrival, Subscriber};

async fn publish_batches(api: &Api, event_type: &str, count: usize, batch: usize, payload: &Value) -> Vec<String> {
    publish_all(api, event_type, (0..count).map(|number| format!("{event_type}-{number:05}")).collect(), batch, payload)
        .await
}

async fn publish_all(api: &Api, event_type: &str, ids: Vec<String>, batch: usize, payload: &Value) -> Vec<String> {
    for ids in ids.chunks(batch) {
        let event =
            |id: &String| json!({ "eventId": id, "eventType": event_type, "sourceService": "e2e", "payload": payload });
        let events: Vec<Value> = ids.iter().map(event).collect();
        let accepted = api.post("/api/events/batch", json!(events).to_string()).await.unwrap();
        assert_eq!(accepted.status, 202, "{}", accepted.text);
    }
    ids
}

/// An endpoint that hangs, and one that does not, each with its own event type.
async fn a_bad_and_a_good_subscriber(server: &Server) -> (Subscriber, Subscriber) {
    let (bad, good) = (Subscriber::start().await, Subscriber::start().await);
    bad.hang();
    server.api.subscribe("bad", "bad", &bad.endpoint()).await;
    server.api.subscribe("good", "good", &good.endpoint()).await;
    (bad, good)
}

/// Publishes events to the good subscriber one by one. Each must arrive before the next one is published.
async fn serve_the_good(server: &Server, good: &Subscriber, count: usize) {
    for number in 0..count {
        let id = server.api.publish("good", &number.to_string()).await;
        let is_there = |arrivals: &[Arrival]| arrivals.iter().any(|arrival| arrival.event_id == id);
        good.wait_until("the event of the good subscriber", is_there).await;
    }
}

/// How many dead letters there are that match the filter.
async fn total(server: &Server, filter: &str) -> u64 {
    let page = server.api.get(&format!("/api/dlt-messages?size=1&{filter}")).await.unwrap().json();
    page["total"].as_u64().unwrap()
}

/// Waits until every event of the bad subscriber was sent or is stored as a dead letter. Returns how many were sent.
async fn all_sent_or_stored(installation: &Installation, bad: &Subscriber, ids: &[String]) -> usize {
    until("every event was sent or is a dead letter", async || {
        let stored = installation.run_sqlite3("SELECT event_id FROM dlt_event");
        let (stored, sent): (HashSet<&str>, _) = (stored.lines().collect(), bad.counts());
        ids.iter().all(|id| stored.contains(id.as_str()) || sent.contains_key(id)).then_some(sent.len())
    })
    .await
}

/// The bad subscriber responds again. Every event arrives, and each arrives once.
async fn recovers(server: &Server, bad: &Subscriber, ids: &[String]) {
    bad.recover();
    bad.wait_until("every event", |arrivals| arrivals.len() >= ids.len()).await;
    until("every dead letter is delivered", async || (total(server, "status=new").await == 0).then_some(())).await;
    let counts = bad.counts();
    assert!(ids.iter().all(|id| counts[id] == 1), "{} requests for {} events", bad.arrivals().len(), ids.len());
    assert_eq!(total(server, "status=failed").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_endpoint_with_large_events_delays_nobody() {
    let installation = Installation::new(&[]);
    let server = installation.start().await;
    let (bad, good) = a_bad_and_a_good_subscriber(&server).await;
    let payload = json!("x".repeat(1024 * 1024 - 16));
    let ids = publish_batches(&server.api, "bad", 100, 10, &payload).await;
    let sent = all_sent_or_stored(&installation, &bad, &ids).await;
    assert!(sent < 64, "{sent} MiB are in flight");
    serve_the_good(&server, &good, 20).await;
    assert_eq!(bad.answered(), 0, "the good subscriber was served while the bad one hung");
    let failures = "SELECT DISTINCT error_code, attempts, retry_count FROM dlt_event";
    assert_eq!(installation.run_sqlite3(failures), "LANE_FULL|0|0\n", "nothing was sent, so no attempt counts");
    recovers(&server, &bad, &ids).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_endpoint_with_many_events_delays_nobody() {
    let installation = Installation::new(&[]);
    let server = installation.start().await;
    let (bad, good) = a_bad_and_a_good_subscriber(&server).await;
    let ids = publish_batches(&server.api, "bad", 20_000, 500, &json!({ "small": true })).await;
    serve_the_good(&server, &good, 20).await;
    assert_eq!(bad.answered(), 0, "the good subscriber was served while the bad one hung");
    let sent = all_sent_or_stored(&installation, &bad, &ids).await;
    assert!(sent <= 64 + 1, "{sent} requests, of 64 permits and one for dead letters");
    recovers(&server, &bad, &ids).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_that_time_out_get_one_request_at_a_time_and_delay_nobody() {
    let installation = Installation::new(&[("DELIVERY__TIMEOUT", "300ms"), ("DLT__TIMEOUT", "300ms")]);
    let server = installation.start().await;
    let (first, good) = a_bad_and_a_good_subscriber(&server).await;
    let mut bad = vec![first];
    for number in 1..12 {
        let subscriber = Subscriber::start().await;
        subscriber.hang();
        server.api.subscribe("bad", &format!("bad-{number}"), &subscriber.endpoint()).await;
        bad.push(subscriber);
    }
    publish_batches(&server.api, "bad", 200, 100, &json!(1)).await;
    serve_the_good(&server, &good, 20).await;
    // Their permits shrink to one, and most events become dead letters because they get no permit.
    until("each has dead letters of events that were not sent", async || {
        let letters = "SELECT count(DISTINCT subscriber_id) FROM dlt_event WHERE error_code = 'LANE_FULL'";
        (installation.run_sqlite3(letters) == "12\n").then_some(())
    })
    .await;
    until("each is asked by one request at a time", async || {
        bad.iter().all(|bad| bad.open_requests() <= 1).then_some(())
    })
    .await;
    assert!(bad.iter().all(|bad| bad.answered() == 0));
    // One of them recovers: it gets everything, while the others still hang.
    bad[3].recover();
    until("every event arrived", async || {
        let page = server.api.get("/api/dlt-messages?status=new&subscriberId=bad-3&size=1").await.unwrap().json();
        (bad[3].counts().len() == 200 && page["total"] == 0).then_some(())
    })
    .await;
    serve_the_good(&server, &good, 20).await;
    assert!(bad.iter().enumerate().all(|(number, bad)| number == 3 || bad.answered() == 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_a_hanging_endpoint_wait_unclaimed_and_delay_no_retry_of_others() {
    let installation = Installation::new(&[("DLT__RETRY_INTERVAL", "1s")]);
    let server = installation.start().await;
    let (bad, good) = a_bad_and_a_good_subscriber(&server).await;
    // The immediate attempts fail, and the first scheduled retry succeeds.
    good.answer_first(4, StatusCode::SERVICE_UNAVAILABLE);
    let ids = publish_batches(&server.api, "bad", 5_000, 500, &json!(1)).await;
    let id = server.api.publish("good", "1").await;
    until("its scheduled retry is made", async || {
        (total(&server, "status=processed&subscriberId=good").await == 1).then_some(())
    })
    .await;
    assert_eq!(good.counts()[&id], 5, "four immediate attempts and one retry");
    assert_eq!(bad.answered(), 0, "the retry was made while the dead letters of the bad endpoint waited");

    all_sent_or_stored(&installation, &bad, &ids).await;
    let claimed = "SELECT count(*) FROM dlt_event WHERE locked_by IS NOT NULL";
    assert!(["0\n", "1\n"].contains(&installation.run_sqlite3(claimed).as_str()), "one dead letter may be in flight");
    recovers(&server, &bad, &ids).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_recovery_dead_letters_arrive_oldest_first_and_fresh_events_between_them() {
    let installation = Installation::new(&[("DELIVERY__CONCURRENCY", "1")]);
    let server = installation.start().await;
    let (bad, _) = a_bad_and_a_good_subscriber(&server).await;
    publish_batches(&server.api, "bad", 300, 100, &json!(1)).await;
    // One event hangs; the others wait for its permit and then become dead letters.
    until("the others are dead letters", async || (total(&server, "status=new").await == 299).then_some(())).await;
    bad.answer_after(Duration::from_millis(10));
    bad.recover();
    bad.wait_for(20).await;
    let fresh = server.api.publish("bad", "2").await;
    bad.wait_for(301).await;
    let arrivals: Vec<String> = bad.arrivals().into_iter().map(|arrival| arrival.event_id).collect();
    // The first is the event that hung.
    let dead_letters: Vec<&String> = arrivals[1..].iter().filter(|id| **id != fresh).collect();
    let oldest_first = installation.run_sqlite3("SELECT event_id FROM dlt_event ORDER BY created_at, id");
    assert_eq!(dead_letters, oldest_first.lines().collect::<Vec<_>>());
    let position = arrivals.iter().position(|id| *id == fresh).unwrap();
    assert!(position < 200, "the fresh event arrived after {position} dead letters");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_while_an_endpoint_hangs_loses_nothing_and_repeats_only_requests_in_flight() {
    let installation = Installation::new(&[]);
    let server = installation.start().await;
    let (bad, good) = a_bad_and_a_good_subscriber(&server).await;
    let mut ids = publish_batches(&server.api, "bad", 3_000, 500, &json!(1)).await;
    serve_the_good(&server, &good, 5).await;
    // 64 deliveries are in flight, the others are dead letters, and nothing is being settled.
    let in_flight = async || {
        let metrics = server.api.get("/metrics").await.unwrap().text;
        let name = "posthaste_in_flight{relay=\"outbox-processor\"} ";
        metrics.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned)
    };
    until("the others are dead letters", async || (total(&server, "status=new").await == 2_936).then_some(())).await;
    until("they are settled", async || (in_flight().await? == "64").then_some(())).await;
    // These wait in memory.
    let more = (0..200).map(|number| format!("more-{number:05}")).collect();
    ids.extend(publish_all(&server.api, "bad", more, 200, &json!(1)).await);
    until("more deliveries wait", async || (in_flight().await? == "264").then_some(())).await;
    server.kill();
    // The requests that it sent are seen when the subscriber has noticed that their connections are closed.
    until("its connections are closed", async || (bad.open_requests() == 0).then_some(())).await;
    let in_flight: HashSet<String> = bad.counts().into_keys().collect();
    assert!(in_flight.len() <= 65, "{} requests, of 64 permits and one for dead letters", in_flight.len());

    let server = installation.start().await;
    serve_the_good(&server, &good, 5).await;
    assert_eq!(bad.answered(), 0);
    bad.recover();
    ids.push(server.api.publish("bad", "2").await);
    until("every event arrived", async || {
        (bad.counts().len() == ids.len() && total(&server, "status=new").await == 0).then_some(())
    })
    .await;
    assert!(server.terminate().await.success());
    for (id, count) in bad.counts() {
        assert!(count == 1 || (count == 2 && in_flight.contains(&id)), "{id} was sent {count} times");
    }
}
