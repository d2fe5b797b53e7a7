//! One pipeline, split over several processes.

use std::collections::BTreeSet;

use axum::http::StatusCode;

use crate::api::Api;
use crate::process::{Backend, Installation, items, until};
use crate::subscriber::Subscriber;

/// The parts that readiness shows.
async fn parts(api: &Api) -> BTreeSet<String> {
    let readiness = api.get("/readyz").await.unwrap().json();
    assert_eq!(readiness["status"], "ready", "{readiness}");
    readiness["parts"].as_object().expect("parts").keys().cloned().collect()
}

fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn events_pass_through_servers_with_different_roles() {
    // Four servers fit into the connections that PostgreSQL allows.
    let settings = [("OUTBOX__LEASE", "5s"), ("DATABASE__MAX_CONNECTIONS", "20")];
    let installation = Installation::on(Backend::Postgres, &settings).await;
    let places = [installation.replica(), installation.replica(), installation.replica()];
    let (door, middle, end, letters) = tokio::join!(
        installation.start_roles("ingest,api"),
        places[0].start_roles("channels,processor"),
        places[1].start_roles("delivery"),
        places[2].start_roles("dlt"),
    );
    assert_eq!(parts(&door.api).await, names(&["database", "ingest"]));
    assert_eq!(parts(&middle.api).await, names(&["channel-discovery", "database", "event-processor"]));
    assert_eq!(parts(&end.api).await, names(&["database", "outbox-processor"]));
    assert_eq!(parts(&letters.api).await, names(&["database", "dlt-intake", "dlt-retry"]));

    let subscriber = Subscriber::start().await;
    door.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let refused = middle.api.post("/api/events", "{}").await.unwrap();
    assert_eq!((refused.status, refused.code().as_str()), (404, "not_found"));
    assert!(refused.text.contains("channels, processor"), "{}", refused.text);
    let event = "{\"eventType\":\"order.placed\",\"sourceService\":\"e2e\",\"payload\":{}}";
    assert_eq!(middle.api.get("/api/dlt-messages").await.unwrap().status, 404);

    door.api.publish("order.placed", "1").await;
    subscriber.wait_for(1).await;
    // A delivery that fails becomes a dead letter in one process, which another shows to the operator and a third replays.
    subscriber.answer(StatusCode::INTERNAL_SERVER_ERROR);
    let id = door.api.publish("order.placed", "2").await;
    until("there is a dead letter", async || {
        let list = door.api.get(&format!("/api/dlt-messages?status=ALL&messageId={id}")).await.unwrap().json();
        (items(&list).len() == 1).then_some(())
    })
    .await;
    subscriber.answer(StatusCode::OK);
    until("the dead letter is delivered", async || {
        let list = door.api.get(&format!("/api/dlt-messages?status=PROCESSED&messageId={id}")).await.unwrap().json();
        (items(&list).len() == 1).then_some(())
    })
    .await;

    // Without the middle, events are accepted, and published when it is back.
    middle.kill();
    let accepted = door.api.send("POST", "/api/events", &[("content-type", "application/json")], event).await.unwrap();
    assert_eq!(accepted.status, 202, "{}", accepted.text);
    let before = subscriber.arrivals().len();
    let _middle = places[0].start_roles("channels,processor").await;
    subscriber.wait_for(before + 1).await;
}
