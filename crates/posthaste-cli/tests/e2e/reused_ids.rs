//! An event id that is published again: a duplicate as long as the outbox keeps its row, and a new event after that.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::process::{Backend, Installation, Server, items, on_each_backend, until};
use crate::subscriber::Subscriber;

on_each_backend! {
    an_id_is_new_again_after_retention_has_removed_its_row
}

async fn publish(server: &Server, payload: u32) -> u16 {
    let event = json!({ "eventId": "X", "eventType": "t", "sourceService": "shop", "payload": payload });
    server.api.post("/api/events", event.to_string()).await.unwrap().status
}

async fn dead_letters(server: &Server, count: usize) -> Vec<Value> {
    until("the dead letters", async || {
        let page = server.api.get("/api/dlt-messages?status=ALL&messageId=X&sort=createdAt").await.unwrap().json();
        (items(&page).len() == count).then(|| items(&page).clone())
    })
    .await
}

async fn an_id_is_new_again_after_retention_has_removed_its_row(backend: Backend) {
    let mut installation = Installation::on(backend, &[("DELIVERY__MAX_RETRY", "0"), ("DLT__MAX_RETRY", "0")]).await;
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    subscriber.answer(StatusCode::SERVICE_UNAVAILABLE);
    server.api.subscribe("t", "billing", &subscriber.endpoint()).await;
    assert_eq!(publish(&server, 1).await, 202);
    let first = dead_letters(&server, 1).await.remove(0);
    assert_eq!(publish(&server, 1).await, 200, "the same event again");
    assert_eq!(publish(&server, 2).await, 409, "another event with its id");
    assert!(server.terminate().await.success());

    installation.set("INGEST__DEDUPE_WINDOW", "1s");
    installation.set("RETENTION__OUTBOX", "1s");
    let server = installation.start().await;
    let trace = async || server.api.get("/api/events/X").await.unwrap().json();
    until("the row is removed", async || trace().await["outbox"].is_null().then_some(())).await;
    assert_eq!(publish(&server, 2).await, 202, "a new event");
    let letters = dead_letters(&server, 2).await;
    assert_eq!(letters[0]["id"], first["id"]);
    let trace = trace().await;
    assert_eq!(trace["deadLetters"][0]["id"], letters[1]["id"], "{trace}");
    assert_eq!(trace["earlier"]["deadLetters"][0]["id"], first["id"], "{trace}");

    let failed = subscriber.arrivals().len();
    subscriber.answer(StatusCode::OK);
    let replay = json!({ "ids": [letters[0]["id"], letters[1]["id"]] }).to_string();
    let replayed = server.api.post("/api/replay?wait=30", replay).await.unwrap().json();
    assert_eq!(replayed["matched"], 2, "{replayed}");
    let mut bodies: Vec<_> = subscriber.arrivals()[failed..].iter().map(|arrival| arrival.body.clone()).collect();
    bodies.sort();
    assert_eq!(bodies, ["1", "2"], "{replayed}");
}
