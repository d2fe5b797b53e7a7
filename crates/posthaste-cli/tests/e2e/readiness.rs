use serde_json::json;

use crate::process::{Installation, until};

#[tokio::test]
async fn a_ready_server_lists_its_parts() {
    let installation = Installation::new(&[]);
    let server = installation.start().await;
    let answer = server.api.get("/readyz").await.unwrap();
    let readiness = answer.json();
    assert_eq!((answer.status, &readiness["status"]), (200, &json!("ready")));
    for part in ["database", "ingest", "event-processor", "outbox-processor", "dlt-intake", "dlt-retry"] {
        assert_eq!(readiness["parts"][part], json!({ "status": "ready" }), "{readiness}");
    }
}

#[tokio::test]
async fn a_full_disk_makes_the_database_unready() {
    let installation = Installation::new(&[]);
    let server = installation.start_on_a_small_disk(4_096).await;
    let event = json!({ "eventType": "order.placed", "sourceService": "e2e", "payload": "x".repeat(64 * 1024) });
    let refused = until("the disk is full", async || {
        let answer = server.api.post("/api/events", event.to_string()).await.unwrap();
        (answer.status != 202).then_some(answer)
    })
    .await;
    assert_eq!(refused.status, 503, "{}", refused.text);
    let answer = until("readiness fails", async || {
        let answer = server.api.get("/readyz").await.unwrap();
        (answer.status == 503).then_some(answer)
    })
    .await;
    let readiness = answer.json();
    assert_eq!(readiness["status"], "unready");
    assert_eq!(readiness["parts"]["database"]["status"], "unready", "{readiness}");
    assert!(readiness["parts"]["database"]["detail"].as_str().is_some_and(|detail| !detail.is_empty()), "{readiness}");
    assert_eq!(server.api.get("/healthz").await.unwrap().status, 200, "the process itself runs");
}
