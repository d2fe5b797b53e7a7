//! If the disk fails during a commit, the server does not know if the event is stored, and its response says so.

use serde_json::json;

use crate::process::Installation;

/// The largest size of a file of the server. The write-ahead log reaches it first.
const MAX_FILE: u32 = 1 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_fails_on_the_disk_returns_commit_unknown() {
    let installation = Installation::new(&[]);
    assert!(installation.start().await.terminate().await.success());
    let server = installation.start_on_a_small_disk(MAX_FILE / 512).await;
    let payload = "x".repeat(50_000);
    let event = |id: usize| {
        json!({ "eventId": format!("e{id}"), "eventType": "t", "sourceService": "s", "payload": payload }).to_string()
    };
    let mut id = 0;
    let refused = loop {
        assert!(id < 200, "the disk did not fail");
        let answer = server.api.post("/api/events", event(id)).await.unwrap();
        if answer.status != 202 {
            break answer;
        }
        id += 1;
    };
    assert_eq!((refused.status, refused.code().as_str()), (503, "commit_unknown"), "{}", refused.text);
    // Writes to the registry return the same error.
    let definition =
        |number: usize| json!({ "eventType": format!("type-{number}"), "description": "d".repeat(1_000) }).to_string();
    let mut number = 0;
    let refused = loop {
        assert!(number < 200, "the disk did not fail");
        let answer = server.api.post("/api/event-definitions", definition(number)).await.unwrap();
        if answer.status != 201 {
            break answer;
        }
        number += 1;
    };
    assert_eq!((refused.status, refused.code().as_str()), (503, "commit_unknown"), "{}", refused.text);
    server.kill();
    // With a working disk, the same event id is stored once, even if the failed commit stored it before.
    let server = installation.start().await;
    let again = server.api.post("/api/events", event(id)).await.unwrap();
    assert!([200, 202].contains(&again.status), "{}", again.text);
    assert_eq!(server.api.post("/api/events", event(id)).await.unwrap().status, 200);
}
