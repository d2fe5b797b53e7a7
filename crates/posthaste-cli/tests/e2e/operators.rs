//! What the API shows to operators: pages, traces, depths and lag.

use std::collections::BTreeSet;

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::process::{Installation, Server, items, until};
use crate::subscriber::Subscriber;

/// One request for each event, and no scheduled retry.
const ONE_REQUEST: [(&str, &str); 3] =
    [("DELIVERY__MAX_RETRY", "0"), ("DLT__MAX_RETRY", "0"), ("DLT__RETRY_INTERVAL", "1ms")];

async fn wait_for_dead_letters(server: &Server, count: usize) -> Value {
    until("the dead letters", async || {
        let page = server.api.get("/api/dlt-messages?status=all&size=500").await.unwrap().json();
        (items(&page).len() == count).then_some(page)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn without_configured_retries_none_is_scheduled_and_the_trace_shows_the_dead_letter() {
    let installation = Installation::new(&ONE_REQUEST);
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    subscriber.answer(StatusCode::INTERNAL_SERVER_ERROR);
    server.api.subscribe("t", "billing", &subscriber.endpoint()).await;
    let mut ids = Vec::new();
    // Each event passes the whole pipeline. This takes far longer than the interval until a retry of the previous one.
    for count in 1..=5 {
        ids.push(server.api.publish("t", "1").await);
        wait_for_dead_letters(&server, count).await;
    }
    assert_eq!(subscriber.arrivals().len(), 5, "one request for each");
    let state = async |id: &str| {
        let trace = server.api.get(&format!("/api/events/{id}")).await.unwrap().json();
        trace["deliveries"][0]["state"].as_str().unwrap().to_owned()
    };
    assert_eq!(state(&ids[0]).await, "DEAD_LETTERED");
    subscriber.answer(StatusCode::OK);
    let page = wait_for_dead_letters(&server, 5).await;
    let dead_letter = items(&page).iter().find(|dead_letter| dead_letter["messageId"] == ids[0].as_str()).unwrap();
    let replay = json!({ "ids": [dead_letter["id"]] }).to_string();
    let replayed = server.api.post("/api/replay?wait=30", replay).await.unwrap().json();
    assert_eq!(replayed["results"][0]["status"], "PROCESSED", "{replayed}");
    assert_eq!(state(&ids[0]).await, "DONE");
    assert_eq!(state(&ids[1]).await, "DEAD_LETTERED");
    assert_eq!(subscriber.arrivals().len(), 6);
    let metrics = server.api.get("/metrics").await.unwrap().text;
    for (status, count) in [("NEW", 4), ("PROCESSED", 1), ("FAILED", 0)] {
        let line = format!("posthaste_dlt_depth{{status=\"{status}\"}} {count}");
        assert!(metrics.lines().any(|metric| metric == line), "{line}: {metrics}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cursors_page_through_a_whole_list() {
    let installation = Installation::new(&ONE_REQUEST);
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    subscriber.answer(StatusCode::INTERNAL_SERVER_ERROR);
    server.api.subscribe("t", "billing", &subscriber.endpoint()).await;
    for _ in 0..7 {
        server.api.publish("t", "1").await;
    }
    let all = wait_for_dead_letters(&server, 7).await;
    let all: BTreeSet<String> =
        items(&all).iter().map(|dead_letter| dead_letter["id"].as_str().unwrap().to_owned()).collect();
    for sort in ["createdAt", "-createdAt", "updatedAt", "-retryCount"] {
        let (mut seen, mut cursor) = (Vec::new(), None::<String>);
        for page in 0.. {
            let next = cursor.map(|cursor| format!("&cursor={cursor}")).unwrap_or_default();
            let path = format!("/api/dlt-messages?status=all&size=3&sort={sort}{next}");
            let answer = server.api.get(&path).await.unwrap();
            assert_eq!(answer.status, 200, "{path}: {}", answer.text);
            let answer = answer.json();
            seen.extend(items(&answer).iter().map(|dead_letter| dead_letter["id"].as_str().unwrap().to_owned()));
            cursor = answer["nextCursor"].as_str().map(str::to_owned);
            assert_eq!(cursor.is_some(), page < 2, "{sort}, page {page}: {answer}");
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!((seen.len(), seen.into_iter().collect::<BTreeSet<_>>()), (7, all.clone()), "{sort}");
    }
    let first = server.api.get("/api/dlt-messages?status=all&size=2").await.unwrap().json();
    let cursor = first["nextCursor"].as_str().unwrap();
    for (query, field) in [
        (format!("cursor={cursor}&page=1"), "cursor"),
        (format!("cursor={cursor}&sort=updatedAt"), "cursor"),
        ("cursor=nonsense".to_owned(), "cursor"),
    ] {
        let refused = server.api.get(&format!("/api/dlt-messages?{query}")).await.unwrap();
        assert_eq!((refused.status, &refused.json()["errors"][0]["field"]), (400, &json!(field)), "{query}");
    }
    for number in 0..4 {
        let definition = json!({ "eventType": format!("type-{number}") }).to_string();
        assert_eq!(server.api.post("/api/event-definitions", definition).await.unwrap().status, 201);
    }
    let page = server.api.get("/api/event-definitions?size=3").await.unwrap().json();
    let cursor = page["nextCursor"].as_str().unwrap();
    let rest = server.api.get(&format!("/api/event-definitions?size=3&cursor={cursor}")).await.unwrap().json();
    assert_eq!((items(&page).len(), items(&rest).len(), rest["nextCursor"].is_null()), (3, 2, true));
    assert!(!items(&page).contains(&items(&rest)[0]));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lag_of_a_relay_rises_while_a_delivery_waits_and_falls_to_zero() {
    let installation = Installation::new(&[]);
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    subscriber.hang();
    server.api.subscribe("t", "billing", &subscriber.endpoint()).await;
    let lag = async || {
        let metrics = server.api.get("/metrics").await.unwrap().text;
        let name = "posthaste_lag_oldest_ms{relay=\"outbox-processor\"} ";
        metrics.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.parse::<f64>().unwrap())
    };
    assert_eq!(lag().await, Some(0.0));
    server.api.publish("t", "1").await;
    until("the delivery waits", async || lag().await.filter(|lag| *lag > 100.0)).await;
    subscriber.recover();
    until("nothing waits", async || lag().await.filter(|lag| *lag == 0.0)).await;
}
