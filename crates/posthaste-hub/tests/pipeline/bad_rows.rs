use std::time::Duration;

use axum::http::StatusCode;
use posthaste_api::DeadLetterStatus;
use posthaste_hub::{DeadLetterFilter, PageRequest, SubscriptionFilter};

use crate::support::{
    Subscriber, ask, assert_counted, execute, header, open, publish, start, subscribe, test_settings, until,
};

const EVENT: &str = r#"{"eventType":"order.placed","sourceService":"shop","payload":1}"#;

#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_subscription_does_not_stop_other_subscriptions() {
    let world = start(test_settings()).await;
    let (good, bad) = (Subscriber::default(), Subscriber::default());
    for (name, subscriber) in [("bad", &bad), ("good", &good)] {
        let endpoint = format!("http://{}/hook", subscriber.start().await);
        subscribe(&world.hub, "order.placed", name, &endpoint, None).await;
    }
    let damage = "UPDATE subscription SET header_names = '{' WHERE subscriber_id = 'bad';
                  UPDATE registry_version SET version = version + 1";
    world.execute(damage).await;
    let id = publish(&world.hub, EVENT).await;
    assert_eq!(header(&good.wait_for(1).await[0].0, "webhook-id"), id);
    let all = PageRequest { page: 0, size: 10, after: None };
    let listed = world.hub.registrations().subscriptions(&SubscriptionFilter::default(), all.clone()).await.unwrap();
    let listed: Vec<_> = listed.items.iter().map(|subscription| subscription.subscriber_id.as_str()).collect();
    assert_eq!(listed, ["good"]);
    world.hub.stop().await;
    assert!(bad.received().is_empty());
    assert_counted("posthaste_unreadable_rows_total{table=\"subscription\"}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_definition_stops_only_its_own_subscriptions() {
    let world = start(test_settings()).await;
    let subscriber = Subscriber::default();
    let endpoint = format!("http://{}/hook", subscriber.start().await);
    subscribe(&world.hub, "order.placed", "good", &endpoint, None).await;
    subscribe(&world.hub, "order.paid", "bad", &endpoint, None).await;
    let damage = "UPDATE event_definition SET created_at = 'yesterday' WHERE event_type = 'order.paid';
                  UPDATE registry_version SET version = version + 1";
    world.execute(damage).await;
    publish(&world.hub, EVENT).await;
    subscriber.wait_for(1).await;
    let all = PageRequest { page: 0, size: 10, after: None };
    let listed = world.hub.registrations().subscriptions(&SubscriptionFilter::default(), all.clone()).await.unwrap();
    assert_eq!(listed.items.len(), 1);
    assert_eq!(world.hub.registrations().definitions(all).await.unwrap().items.len(), 1);
    world.hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_progress_does_not_keep_the_hub_from_starting() {
    let folder = tempfile::tempdir().unwrap();
    let subscriber = Subscriber::default();
    let hub = open(folder.path(), test_settings()).await;
    subscribe(&hub, "*", "all", &format!("http://{}/hook", subscriber.start().await), None).await;
    publish(&hub, EVENT).await;
    publish(&hub, r#"{"eventType":"order.paid","sourceService":"shop","payload":1}"#).await;
    subscriber.wait_for(2).await;
    hub.stop().await;
    let damage = "UPDATE log_group SET completed = 'junk' WHERE group_name = 'outbox-processor';
                  UPDATE log_group SET watermark = 'junk' WHERE group_name = 'event-processor'
                     AND partition_id = (SELECT id FROM log_partition WHERE topic = 'posthaste.events.order.paid')";
    execute(folder.path(), damage).await;

    let hub = open(folder.path(), test_settings()).await;
    let id = publish(&hub, EVENT).await;
    until("the new event arrives", async || {
        subscriber.received().iter().any(|(headers, _)| header(headers, "webhook-id") == id).then_some(())
    })
    .await;
    assert!(hub.trace(&id).await.unwrap().is_some());
    hub.measure_depths().await.unwrap();
    hub.stop().await;
    assert_counted("posthaste_unreadable_rows_total{table=\"log_group\"}");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_record_that_the_bus_cannot_read_is_quarantined() {
    let folder = tempfile::tempdir().unwrap();
    let subscriber = Subscriber::default();
    let hub = open(folder.path(), test_settings()).await;
    subscribe(&hub, "*", "all", &format!("http://{}/hook", subscriber.start().await), None).await;
    publish(&hub, EVENT).await;
    subscriber.wait_for(1).await;
    hub.stop().await;
    let damage = "INSERT INTO log_record (partition_id, \"offset\", key, headers, value)
                  SELECT id, next_offset, 'damaged', '{', x'00' FROM log_partition WHERE topic LIKE 'posthaste.events.%';
                  INSERT INTO log_record (partition_id, \"offset\", key, value)
                  SELECT id, next_offset + 1, x'ff', x'00' FROM log_partition WHERE topic LIKE 'posthaste.events.%';
                  UPDATE log_partition SET next_offset = next_offset + 2 WHERE topic LIKE 'posthaste.events.%'";
    execute(folder.path(), damage).await;

    let hub = open(folder.path(), test_settings()).await;
    let id = publish(&hub, EVENT).await;
    assert_eq!(header(&subscriber.wait_for(2).await[1].0, "webhook-id"), id);
    hub.stop().await;
    let quarantined = "SELECT group_concat(key || ' ' || coalesce(headers, ''), '|') FROM quarantined_record
                       WHERE key = 'damaged' AND reason LIKE 'headers %'";
    assert_eq!(ask::<String>(folder.path(), quarantined).await, r#"damaged [["unreadable","{"]]"#);
    assert_eq!(ask::<i64>(folder.path(), "SELECT count(*) FROM quarantined_record").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_dead_letter_does_not_stop_other_retries() {
    let folder = tempfile::tempdir().unwrap();
    let subscriber = Subscriber::default();
    // No retry happens before the row is damaged.
    let mut settings = test_settings();
    settings.dlt.retry_interval = Duration::from_hours(1);
    let hub = open(folder.path(), settings).await;
    subscribe(&hub, "*", "all", &format!("http://{}/hook", subscriber.start().await), None).await;
    subscriber.answer(StatusCode::SERVICE_UNAVAILABLE);
    let bad = publish(&hub, EVENT).await;
    let good = publish(&hub, EVENT).await;
    let all = DeadLetterFilter { status: None, ..DeadLetterFilter::default() };
    until("both are dead letters", async || (hub.dead_letters(&all).await.unwrap().total == 2).then_some(())).await;
    hub.stop().await;
    let damage = format!(
        "UPDATE dlt_event SET scheduled_at = 0;
         UPDATE dlt_event SET attempts = -1 WHERE event_id = '{bad}'"
    );
    execute(folder.path(), damage).await;
    subscriber.answer(StatusCode::OK);
    let hub = open(folder.path(), test_settings()).await;
    until("the other is delivered", async || {
        let letters = hub.dead_letters(&all).await.unwrap().items;
        let processed = |letter: &posthaste_api::DeadLetter| letter.status == DeadLetterStatus::Processed;
        letters.iter().any(|letter| letter.message_id == good && processed(letter)).then_some(())
    })
    .await;
    until("the unreadable one has failed", async || {
        let given_up = "SELECT count(*) FROM dlt_event WHERE error_code = 'unreadable' AND due IS NULL";
        (ask::<i64>(folder.path(), given_up).await == 1).then_some(())
    })
    .await;
    hub.stop().await;
    assert_counted("posthaste_unreadable_rows_total{table=\"dlt_event\"}");
}
