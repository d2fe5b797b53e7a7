use std::time::Duration;

use axum::http::StatusCode;
use posthaste_api::{DeadLetter, DeadLetterStatus, DeliveryState};
use posthaste_hub::{DeadLetterFilter, Hub};

use crate::support::{Subscriber, header, publish, start, subscribe, test_settings, until};

/// Waits for this many dead letters, and returns them, oldest first.
async fn dead_letters(hub: &Hub, count: usize) -> Vec<DeadLetter> {
    let all = DeadLetterFilter { status: None, ..DeadLetterFilter::default() };
    let mut letters = until("the dead letters are stored", async || {
        let page = hub.dead_letters(&all).await.unwrap();
        (page.items.len() >= count).then_some(page.items)
    })
    .await;
    letters.sort_by_key(|letter| letter.id);
    letters
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_that_is_used_again_after_its_row_was_removed_is_a_new_event() {
    let mut settings = test_settings();
    settings.dlt.max_retry = 0;
    let world = start(settings).await;
    let subscriber = Subscriber::default();
    subscriber.answer(StatusCode::SERVICE_UNAVAILABLE);
    let endpoint = format!("http://{}/hook", subscriber.start().await);
    subscribe(&world.hub, "order.placed", "orders", &endpoint, None).await;
    let event = |number: u32| {
        format!(r#"{{"eventId":"X","eventType":"order.placed","sourceService":"shop","payload":{number}}}"#)
    };

    publish(&world.hub, &event(1)).await;
    let first = dead_letters(&world.hub, 1).await.remove(0);
    let trace = world.hub.trace("X").await.unwrap().unwrap();
    assert_eq!((trace.dead_letters.len(), trace.earlier), (1, None));
    until("the row is done", async || world.hub.trace("X").await.unwrap()?.outbox?.processed_at).await;
    world.execute("DELETE FROM outbox_event").await;
    let trace = world.hub.trace("X").await.unwrap().unwrap();
    assert_eq!((trace.outbox, trace.dead_letters.len(), trace.earlier), (None, 1, None), "it is still the newest");

    publish(&world.hub, &event(2)).await;
    let letters = dead_letters(&world.hub, 2).await;
    assert_eq!(letters[0].id, first.id);
    let trace = world.hub.trace("X").await.unwrap().unwrap();
    let earlier = trace.earlier.unwrap();
    assert_eq!(trace.dead_letters.iter().map(|letter| letter.id).collect::<Vec<_>>(), [letters[1].id]);
    assert_eq!(earlier.dead_letters.iter().map(|letter| letter.id).collect::<Vec<_>>(), [first.id]);
    for (topics, deliveries) in [(trace.topics, trace.deliveries), (earlier.topics, earlier.deliveries)] {
        assert_eq!(topics.unwrap().len(), 3, "the event, its delivery and its dead letter");
        let states: Vec<_> = deliveries.unwrap().iter().map(|delivery| delivery.state).collect();
        assert_eq!(states, [DeliveryState::DeadLettered]);
    }

    let failed = subscriber.received().len();
    subscriber.answer(StatusCode::OK);
    let ids: Vec<_> = letters.iter().map(|letter| letter.id).collect();
    let replay = world.hub.replay(&ids, None, Some(Duration::from_secs(60))).await.unwrap();
    assert_eq!(replay.matched, 2);
    assert!(replay.results.unwrap().iter().all(|result| result.status == DeadLetterStatus::Processed));
    let replayed = &subscriber.received()[failed..];
    let mut bodies: Vec<_> = replayed.iter().map(|(_, body)| body.clone()).collect();
    bodies.sort();
    assert_eq!(bodies, ["1", "2"]);
    assert!(replayed.iter().all(|(headers, _)| header(headers, "webhook-id") == "X"));

    // Of the first event only the dead letter is left, and the newest event is delivered.
    world.execute("DELETE FROM outbox_event; DELETE FROM log_record").await;
    let trace = world.hub.trace("X").await.unwrap().unwrap();
    assert_eq!(trace.dead_letters[0].id, letters[1].id);
    assert_eq!(trace.earlier.unwrap().dead_letters[0].id, first.id);
    world.hub.stop().await;
}
