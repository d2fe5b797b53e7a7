use axum::http::StatusCode;
use posthaste_api::AuthIn;

use crate::support::{Subscriber, log_lines, publish, start, subscribe, until, with_fast_retries};

#[tokio::test(flavor = "multi_thread")]
async fn failed_attempts_are_warnings_and_the_last_one_is_an_error() {
    let world = start(with_fast_retries()).await;
    let subscriber = Subscriber::default();
    let endpoint = format!("http://{}/hook?key=s3cret-query", subscriber.start().await);
    let token = AuthIn::HeaderToken { token: Some("s3cret-token".to_owned().into()) };
    subscribe(&world.hub, "order.placed", "orders", &endpoint, Some(token)).await;
    subscriber.answer(StatusCode::INTERNAL_SERVER_ERROR);
    let event = r#"{"eventType":"order.placed","sourceService":"shop","payload":{"card":"s3cret-payload"}}"#;
    let id = publish(&world.hub, event).await;
    // Four immediate attempts and three scheduled ones.
    let lines = until("both relays logged the last attempt", async || {
        let lines: Vec<_> = log_lines().into_iter().filter(|line| line.contains(&id)).collect();
        (lines.iter().filter(|line| line.contains("ERROR")).count() == 2).then_some(lines)
    })
    .await;
    world.hub.stop().await;
    let logged: Vec<(&str, &str, usize)> = lines
        .iter()
        .map(|line| {
            let level = if line.contains("ERROR") { "ERROR" } else { "WARN" };
            let relay = ["outbox-processor", "dlt-retry"].into_iter().find(|relay| line.contains(relay)).unwrap();
            let attempt = (1..9).find(|attempt| line.contains(&format!("attempt={attempt} "))).unwrap();
            (level, relay, attempt)
        })
        .collect();
    let expected = [
        ("WARN", "outbox-processor", 1),
        ("WARN", "outbox-processor", 2),
        ("WARN", "outbox-processor", 3),
        ("ERROR", "outbox-processor", 4),
        ("WARN", "dlt-retry", 5),
        ("WARN", "dlt-retry", 6),
        ("ERROR", "dlt-retry", 7),
    ];
    assert_eq!(logged, expected, "{lines:#?}");
    for line in &lines {
        assert!(line.contains("event_type=\"order.placed\"") && line.contains("HTTP 500"), "{line}");
        assert!(line.contains("subscription=\"0"), "a UUID: {line}");
    }
    assert!(!log_lines().iter().any(|line| line.contains("s3cret")), "no payload and no credentials");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outbox_row_that_goes_dead_in_a_channel_is_an_error() {
    let world = start(with_fast_retries()).await;
    world
        .execute("INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('row-9', 'not a topic 9', '1')")
        .await;
    let line = until("the dead row is logged", async || {
        log_lines().into_iter().find(|line| line.contains("ERROR") && line.contains("not a topic 9"))
    })
    .await;
    assert!(line.contains("became dead") && line.contains("rows=1"), "{line}");
    let error = "SELECT last_error FROM outbox_event WHERE event_id = 'row-9' AND status = 3";
    assert!(world.ask::<String>(error).await.contains("event_type_refused"));
    world.hub.stop().await;
}
