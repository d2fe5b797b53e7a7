use std::time::Duration;

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::process::{Backend, Installation, items, on_each_backend, until};
use crate::subscriber::Subscriber;

on_each_backend! {
    an_event_published_by_http_arrives_at_its_subscriber
    a_row_inserted_by_another_program_is_delivered
    an_endpoint_that_was_down_receives_its_events_by_scheduled_retries
    an_exhausted_dead_letter_is_replayed
    publishing_the_same_event_again_stores_it_once
    a_stop_finishes_requests_in_flight_and_the_next_start_delivers_the_rest
}

async fn an_event_published_by_http_arrives_at_its_subscriber(backend: Backend) {
    let installation = Installation::on(backend, &[]).await;
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let payload = "{\"a\" : 1.0,\t\"a\":2}";
    let id = server.api.publish("order.placed", payload).await;
    let arrivals = subscriber.wait_for(1).await;
    assert_eq!((arrivals[0].event_id.as_str(), &arrivals[0].body[..]), (id.as_str(), payload.as_bytes()));

    let trace = until("the trace shows the delivery", async || {
        let trace = server.api.get(&format!("/api/events/{id}")).await.unwrap().json();
        // Kafka has no index of keys, so a trace does not show what is on its topics.
        let is_shown = match backend {
            Backend::Kafka => trace["deliveries"].is_null(),
            Backend::Sqlite | Backend::Postgres => trace["deliveries"][0]["state"] == "DONE",
        };
        (is_shown && trace["outbox"]["status"] == "PROCESSED").then_some(trace)
    })
    .await;
    assert_eq!(trace["outbox"]["status"], "PROCESSED");
    let metrics = until("the delivery is counted", async || {
        let metrics = server.api.get("/metrics").await.unwrap().text;
        metrics.contains("posthaste_dispatch_success_total{relay=\"outbox-processor\"} 1").then_some(metrics)
    })
    .await;
    let documented = include_str!("../../../../docs/metrics.md");
    for line in metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let name = line.split(' ').next().unwrap();
        assert!(documented.contains(&format!("`{name}`")), "docs/metrics.md does not list {name}");
    }
    assert_eq!(server.api.get("/healthz").await.unwrap().status, 200);
    assert!(server.terminate().await.success());
}

async fn a_row_inserted_by_another_program_is_delivered(backend: Backend) {
    let installation = Installation::on(backend, &[]).await;
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("legacy.saved", "audit", &subscriber.endpoint()).await;
    let insert = "INSERT INTO outbox_event (event_type, payload) VALUES ('legacy.saved', '{\"from\": \"sql\"}'), \
                  ('legacy.saved', '[2]')";
    installation.execute(insert);
    let arrivals = subscriber.wait_for(2).await;
    let mut bodies: Vec<_> = arrivals.iter().map(|arrival| String::from_utf8_lossy(&arrival.body)).collect();
    bodies.sort();
    assert_eq!(bodies, ["[2]", "{\"from\": \"sql\"}"]);
    assert_eq!(arrivals[0].headers["content-type"], "application/json");

    // A row whose event type is not a valid topic name becomes dead and does not block other rows.
    let insert = "INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('odd', 'no topic!', '1')";
    installation.execute(insert);
    until("the odd row is dead", async || {
        let trace = server.api.get("/api/events/odd").await.unwrap().json();
        (trace["outbox"]["exhausted"] == true).then_some(())
    })
    .await;
    server.api.publish("legacy.saved", "3").await;
    subscriber.wait_for(3).await;
}

async fn an_endpoint_that_was_down_receives_its_events_by_scheduled_retries(backend: Backend) {
    let installation = Installation::on(backend, &[("DLT__RETRY_INTERVAL", "1s"), ("DLT__MAX_RETRY", "30")]).await;
    let server = installation.start().await;
    let subscriber = Subscriber::down();
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let mut published = Vec::new();
    for number in 0..20 {
        published.push(server.api.publish("order.placed", &number.to_string()).await);
    }
    let dead_letters = until("all are dead letters", async || {
        let page = server.api.get("/api/dlt-messages?status=ALL&size=100").await.unwrap().json();
        // The items and their total are read one after the other, so the total may be ahead.
        (items(&page).len() == 20).then_some(page)
    })
    .await;
    // The first event was sent. Later ones may have become dead letters without an attempt.
    let is_first = |dead_letter: &&Value| dead_letter["messageId"] == published[0].as_str();
    let dead_letter = items(&dead_letters).iter().find(is_first).unwrap();
    assert_eq!((&dead_letter["errorCode"], &dead_letter["subscriberId"]), (&json!("503"), &json!("billing")));
    subscriber.come_up().await;
    subscriber.wait_for(20).await;
    let counts = subscriber.counts();
    assert!(published.iter().all(|id| counts[id] == 1), "each arrived once: {counts:?}");
    until("all are processed", async || {
        let page = server.api.get("/api/dlt-messages?status=PROCESSED").await.unwrap().json();
        (page["total"] == 20).then_some(())
    })
    .await;
    assert_eq!(server.api.get("/api/dlt-messages").await.unwrap().json()["total"], 0, "none is FAILED");
}

async fn an_exhausted_dead_letter_is_replayed(backend: Backend) {
    let installation = Installation::on(backend, &[("DLT__RETRY_INTERVAL", "100ms")]).await;
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    subscriber.answer(StatusCode::BAD_GATEWAY);
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let id = server.api.publish("order.placed", "1").await;
    let dead_letter = until("the dead letter has no retries left", async || {
        let page = server.api.get(&format!("/dlt-messages?messageId={id}&sort=-retryCount")).await.unwrap().json();
        items(&page).iter().find(|dead_letter| dead_letter["retryCount"] == 3).cloned()
    })
    .await;
    subscriber.answer(StatusCode::OK);
    let replay = json!({ "ids": [dead_letter["id"]], "reason": "the gateway is back" });
    let replayed = server.api.post("/api/replay?wait=30", replay.to_string()).await.unwrap();
    assert_eq!(replayed.status, 200);
    let replayed = replayed.json();
    assert_eq!((&replayed["matched"], &replayed["results"][0]["status"]), (&json!(1), &json!("PROCESSED")));
    let path = format!("/api/dlt-messages/{}", dead_letter["id"].as_str().unwrap());
    let detail = server.api.get(&path).await.unwrap().json();
    let history = detail["history"].as_array().unwrap();
    let triggers: Vec<_> = history.iter().map(|attempt| attempt["trigger"].as_str().unwrap()).collect();
    assert_eq!(triggers, ["SCHEDULED", "SCHEDULED", "SCHEDULED", "REPLAY"]);
    assert_eq!((&detail["status"], &detail["retryCount"]), (&json!("PROCESSED"), &json!(3)));
    assert_eq!(subscriber.arrivals().last().unwrap().headers["posthaste-attempt"], "8");
}

async fn publishing_the_same_event_again_stores_it_once(backend: Backend) {
    let installation = Installation::on(backend, &[]).await;
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let event = |payload| {
        format!(r#"{{"eventId":"order-1","eventType":"order.placed","sourceService":"s","payload":{payload}}}"#)
    };
    assert_eq!(server.api.post("/api/events", event(1)).await.unwrap().status, 202);
    assert_eq!(server.api.post("/api/events", event(1)).await.unwrap().status, 200);
    let other = server.api.post("/api/events", event(2)).await.unwrap();
    assert_eq!((other.status, other.code().as_str()), (409, "event_id_conflict"));
    let keyed = r#"{"eventType":"order.placed","sourceService":"s","payload":3}"#;
    let headers = [("content-type", "application/json"), ("idempotency-key", "order-3")];
    assert_eq!(server.api.send("POST", "/api/events", &headers, keyed).await.unwrap().status, 202);
    let again = server.api.send("POST", "/api/events", &headers, keyed).await.unwrap();
    assert_eq!((again.status, &again.json()["eventId"]), (200, &json!("order-3")));
    subscriber.wait_for(2).await;
    assert!(server.terminate().await.success());
    assert_eq!(subscriber.counts().len(), 2);
    assert_eq!(subscriber.arrivals().len(), 2);
}

async fn a_stop_finishes_requests_in_flight_and_the_next_start_delivers_the_rest(backend: Backend) {
    let installation = Installation::on(backend, &[("DELIVERY__CONCURRENCY", "4")]).await;
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    subscriber.hang();
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let events: Vec<_> = (0..40)
        .map(|number| json!({ "eventType": "order.placed", "sourceService": "s", "eventId": format!("e{number}"), "payload": number }))
        .collect();
    let accepted = server.api.post("/api/events/batch", json!(events).to_string()).await.unwrap();
    assert_eq!(accepted.status, 202);
    subscriber.wait_for(4).await;
    let stopping = tokio::spawn(server.terminate());
    until("the server stops", async || installation.api().get("/readyz").await.is_err().then_some(())).await;
    // The relay stops a moment after the API. All other events would take five seconds.
    subscriber.answer_after(Duration::from_millis(500));
    subscriber.recover();
    let status = stopping.await.unwrap();
    assert!(status.success(), "{status}: {}", installation.log());
    let before = subscriber.arrivals().len();
    assert_eq!(subscriber.answered(), before as u64, "every request that was sent got its response");
    assert!(before < 40, "the stop came after the last delivery");
    subscriber.answer_after(Duration::ZERO);

    let server = installation.start().await;
    subscriber.wait_until("all events", |arrivals| arrivals.len() >= 40).await;
    assert!(server.terminate().await.success());
    let counts = subscriber.counts();
    assert_eq!((counts.len(), subscriber.arrivals().len()), (40, 40), "a clean stop causes no duplicate");
}
