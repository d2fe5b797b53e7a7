use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use axum::http::StatusCode;
use posthaste_api::{AuthIn, DeadLetterStatus, EventIn, Trigger};
use posthaste_hub::{Accepted, DeadLetterFilter, Settings};

use crate::support::{
    Subscriber, execute, header, open, publish, start, subscribe, test_settings, until, with_fast_retries,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_payload_reaches_its_subscribers_byte_for_byte() {
    let world = start(test_settings()).await;
    let (orders, all, others) = (Subscriber::default(), Subscriber::default(), Subscriber::default());
    let hook = |address: SocketAddr| format!("http://{address}/hook");
    let basic = AuthIn::BasicAuth { username: "shop".to_owned(), password: Some("s3cret".to_owned().into()) };
    subscribe(&world.hub, "order.placed", "orders", &hook(orders.start().await), Some(basic)).await;
    subscribe(&world.hub, "*", "all", &hook(all.start().await), None).await;
    subscribe(&world.hub, "order.paid", "others", &hook(others.start().await), None).await;

    let payload = r#"{ "id":1,  "total" : 1e400, "id" : 2, "name":"\u00e9é" }"#;
    let body = format!(
        r#"{{"eventType":"order.placed","sourceService":"shop","headers":{{"Region":"eu","bad name":"x"}},"payload":{payload}}}"#
    );
    let id = publish(&world.hub, &body).await;

    let (headers, body) = orders.wait_for(1).await.remove(0);
    assert_eq!(body, payload.as_bytes());
    assert_eq!(header(&headers, "webhook-id"), id);
    assert_eq!(header(&headers, "content-type"), "application/json");
    assert_eq!(header(&headers, "posthaste-event-type"), "order.placed");
    assert_eq!(header(&headers, "posthaste-attempt"), "1");
    assert_eq!(header(&headers, "posthaste-header-region"), "eu");
    assert_eq!(header(&headers, "authorization"), "Basic c2hvcDpzM2NyZXQ=");
    assert!(header(&headers, "user-agent").starts_with("posthaste/"));
    assert_eq!(all.wait_for(1).await[0].1, payload.as_bytes());

    let trace = until("both deliveries are done", async || {
        let trace = world.hub.trace(&id).await.unwrap().unwrap();
        let deliveries = trace.deliveries.as_ref()?;
        let done = deliveries.iter().all(|delivery| delivery.state == posthaste_api::DeliveryState::Done);
        (deliveries.len() == 2 && done).then_some(trace)
    })
    .await;
    assert_eq!(trace.topics.as_ref().map(Vec::len), Some(3), "one record of the event, two of deliveries: {trace:?}");
    assert!(trace.dead_letters.is_empty());
    world.hub.stop().await;
    assert_eq!((orders.received().len(), all.received().len(), others.received().len()), (1, 1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_events_arrive_once_each() {
    let world = start(test_settings()).await;
    let subscriber = Subscriber::default();
    let endpoint = format!("http://{}/hook", subscriber.start().await);
    subscribe(&world.hub, "*", "all", &endpoint, None).await;
    let mut published = Vec::new();
    for batch in 0..10 {
        let event = |number: usize| {
            let text = format!(r#"{{"eventType":"type-{}","sourceService":"s","payload":{number}}}"#, number % 7);
            serde_json::from_str::<EventIn>(&text).unwrap().validate().unwrap()
        };
        let events: Vec<_> = (0..100).map(|number| event(batch * 100 + number)).collect();
        published.extend(events.iter().map(|event| event.id().to_owned()));
        let accepted = world.hub.ingest().publish(events, false).await.unwrap();
        assert!(accepted.iter().all(|accepted| matches!(accepted, Accepted::Stored)));
    }
    subscriber.wait_for(1_000).await;
    world.hub.stop().await;
    let mut counts: HashMap<String, usize> = HashMap::new();
    for (headers, _) in subscriber.received() {
        *counts.entry(header(&headers, "webhook-id").to_owned()).or_default() += 1;
    }
    assert_eq!(counts.len(), published.len());
    assert!(published.iter().all(|id| counts.get(id) == Some(&1)), "an event is missing or came twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_endpoint_is_retried_dead_lettered_and_recovers_by_itself() {
    let world = start(with_fast_retries()).await;
    let subscriber = Subscriber::default();
    let endpoint = format!("http://{}/hook", subscriber.start().await);
    subscribe(&world.hub, "order.placed", "orders", &endpoint, None).await;
    // The first attempt, three immediate retries, and the first scheduled retry.
    subscriber.answer_first(5, StatusCode::SERVICE_UNAVAILABLE);
    let id = publish(&world.hub, r#"{"eventType":"order.placed","sourceService":"shop","payload":{"n":1}}"#).await;

    let all = DeadLetterFilter { status: None, ..DeadLetterFilter::default() };
    let letter = until("the dead letter is processed", async || {
        let page = world.hub.dead_letters(&all).await.unwrap();
        page.items.into_iter().find(|letter| letter.status == DeadLetterStatus::Processed)
    })
    .await;
    assert_eq!(letter.message_id, id);
    let detail = world.hub.dead_letter(letter.id).await.unwrap().unwrap();
    let failure = detail.failure.unwrap();
    assert_eq!((failure.code.as_str(), failure.attempts), ("503", 4));
    let codes: Vec<_> = detail.history.iter().map(|attempt| attempt.error_code.as_deref()).collect();
    assert_eq!(codes, [Some("503"), None], "of the scheduled retries, the second succeeded");
    world.hub.stop().await;

    let received = subscriber.received();
    let attempts: Vec<_> =
        received.iter().map(|(headers, _)| header(headers, "posthaste-attempt").to_owned()).collect();
    assert_eq!(attempts, ["1", "2", "3", "4", "5", "6"], "scheduled retries continue the count of immediate attempts");
    assert!(received.iter().all(|(headers, _)| header(headers, "webhook-id") == id));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exhausted_dead_letter_stays_failed_until_it_is_replayed() {
    let world = start(with_fast_retries()).await;
    let subscriber = Subscriber::default();
    let endpoint = format!("http://{}/hook", subscriber.start().await);
    subscribe(&world.hub, "order.placed", "orders", &endpoint, None).await;
    subscriber.answer(StatusCode::INTERNAL_SERVER_ERROR);
    publish(&world.hub, r#"{"eventType":"order.placed","sourceService":"shop","payload":null}"#).await;
    let failed =
        DeadLetterFilter { status: Some(posthaste_hub::DeadLetterStatus::Failed), ..DeadLetterFilter::default() };
    let letter = until("the dead letter is exhausted", async || {
        let page = world.hub.dead_letters(&failed).await.unwrap();
        page.items.into_iter().find(|letter| letter.retry_count == 3)
    })
    .await;
    assert_eq!(subscriber.received().len(), 7, "four immediate attempts and three scheduled");

    let again = world.hub.replay(&[letter.id], Some("try".to_owned()), Some(Duration::from_secs(20))).await.unwrap();
    assert_eq!(again.matched, 1);
    let results = again.results.unwrap();
    assert_eq!((results[0].status, results[0].error_code.as_deref()), (DeadLetterStatus::Failed, Some("500")));

    subscriber.answer(StatusCode::NO_CONTENT);
    let again = world.hub.replay(&[letter.id], None, Some(Duration::from_secs(20))).await.unwrap();
    assert_eq!(again.results.unwrap()[0].status, DeadLetterStatus::Processed);
    let detail = world.hub.dead_letter(letter.id).await.unwrap().unwrap();
    assert_eq!(detail.letter.retry_count, 3, "replays do not change the count");
    let triggers: Vec<_> = detail.history.iter().map(|attempt| attempt.trigger).collect();
    assert_eq!(triggers[3..], [Trigger::Replay, Trigger::Replay]);
    assert_eq!(subscriber.received().last().unwrap().1, "null".as_bytes());
    world.hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_with_unreadable_credentials_become_dead_letters_and_stop_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let (sealed, open_to_all) = (Subscriber::default(), Subscriber::default());
    let hub = open(folder.path(), test_settings()).await;
    let token = AuthIn::HeaderToken { token: Some("t0ken".to_owned().into()) };
    subscribe(&hub, "sealed", "sealed", &format!("http://{}/hook", sealed.start().await), Some(token)).await;
    subscribe(&hub, "open", "open", &format!("http://{}/hook", open_to_all.start().await), None).await;
    hub.stop().await;
    std::fs::remove_file(folder.path().join("hub.key")).unwrap();

    let hub = open(folder.path(), test_settings()).await;
    let id = publish(&hub, r#"{"eventType":"sealed","sourceService":"s","payload":1}"#).await;
    publish(&hub, r#"{"eventType":"open","sourceService":"s","payload":2}"#).await;
    open_to_all.wait_for(1).await;
    let new = DeadLetterFilter { status: Some(posthaste_hub::DeadLetterStatus::New), ..DeadLetterFilter::default() };
    let letter = until("the dead letter is stored", async || hub.dead_letters(&new).await.unwrap().items.pop()).await;
    assert_eq!((letter.message_id, letter.error_code.as_deref(), letter.retry_count), (id, Some("sealed"), 0));
    assert!(sealed.received().is_empty());
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_endpoint_does_not_delay_other_endpoints() {
    let mut settings = Settings::default();
    settings.delivery.concurrency = 4;
    let world = start(settings).await;
    // An endpoint that accepts connections and never responds.
    let hanging = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let neighbour = Subscriber::default();
    subscribe(&world.hub, "slow", "slow", &format!("http://{}/", hanging.local_addr().unwrap()), None).await;
    subscribe(&world.hub, "fast", "fast", &format!("http://{}/hook", neighbour.start().await), None).await;
    let event = |event_type: &str| {
        let text = format!(r#"{{"eventType":"{event_type}","sourceService":"s","payload":1}}"#);
        serde_json::from_str::<EventIn>(&text).unwrap().validate().unwrap()
    };
    for _ in 0..10 {
        let burst: Vec<_> = (0..1_000).map(|_| event("slow")).collect();
        world.hub.ingest().publish(burst, false).await.unwrap();
    }
    let all = DeadLetterFilter { status: None, ..DeadLetterFilter::default() };
    until("deliveries to the slow endpoint are deferred", async || {
        (world.hub.dead_letters(&all).await.unwrap().total > 3_000).then_some(())
    })
    .await;
    world.hub.ingest().publish(vec![event("fast")], false).await.unwrap();
    neighbour.wait_for(1).await;
    let letter = world.hub.dead_letters(&all).await.unwrap().items.pop().unwrap();
    assert!(["LANE_FULL", "504"].contains(&letter.error_code.as_deref().unwrap()), "{letter:?}");
    world.hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_accepted_before_a_restart_is_delivered_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let subscriber = Subscriber::default();
    let hub = open(folder.path(), test_settings()).await;
    let endpoint = format!("http://{}/hook", subscriber.start().await);
    subscribe(&hub, "late", "late", &endpoint, None).await;
    // Delayed, so that the first process cannot have delivered it.
    let id = publish(&hub, r#"{"eventType":"late","sourceService":"s","deliverAfter":"1h","payload":1}"#).await;
    hub.stop().await;
    execute(folder.path(), "UPDATE outbox_event SET available_at = '2000-01-01T00:00:00Z'").await;
    let hub = open(folder.path(), test_settings()).await;
    let received = subscriber.wait_for(1).await;
    assert_eq!(header(&received[0].0, "webhook-id"), id);
    hub.stop().await;
}
