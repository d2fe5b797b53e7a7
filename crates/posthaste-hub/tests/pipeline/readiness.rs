use std::time::Duration;

use posthaste_api::{EventIn, Reset, ResetTo};
use posthaste_hub::{Hub, PartStatus};
use posthaste_sql::sqlite::HubDatabase;

use crate::support::{
    Subscriber, assert_counted, execute, header, log_lines, open, open_database, open_on, publish, start, subscribe,
    test_settings, until,
};

const EVENT: &str = r#"{"eventType":"order.placed","sourceService":"shop","payload":1}"#;

/// Waits until the hub is not ready because of this part. Returns the reason.
async fn until_unready(hub: &Hub, part: &str) -> String {
    until("readiness fails", async || {
        let parts = hub.readiness().await.parts;
        let mut unready = parts.into_iter().filter_map(|(name, status)| match status {
            PartStatus::Ready | PartStatus::Degraded(_) => None,
            PartStatus::Unready(reason) => Some((name, reason)),
        });
        let (name, reason) = unready.next()?;
        assert_eq!((name.as_str(), unready.next()), (part, None));
        Some(reason)
    })
    .await
}

async fn until_ready(hub: &Hub) {
    until("readiness returns", async || hub.readiness().await.is_ready().then_some(())).await;
}

/// Limits how many pages the file may have, as a disk of that size would.
async fn limit_pages(database: &HubDatabase, pages: &'static str) {
    let limit = database.database().write("limit the file", move |connection| {
        Box::pin(async move { sqlx::raw_sql(pages).execute(connection).await.map(|_| ()) })
    });
    limit.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn readiness_names_a_database_that_refuses_writes_until_it_accepts_them() {
    let folder = tempfile::tempdir().unwrap();
    let database = open_database(folder.path()).await;
    let hub = open_on(folder.path(), database.clone(), test_settings()).await;
    until_ready(&hub).await;
    // The smallest possible limit: the number of pages that the file has.
    limit_pages(&database, "PRAGMA max_page_count = 1").await;
    let payload = "x".repeat(64 * 1024);
    let event = format!(r#"{{"eventType":"order.placed","sourceService":"shop","payload":"{payload}"}}"#);
    until("no event is stored any more", async || {
        let event = serde_json::from_str::<EventIn>(&event).unwrap().validate().unwrap();
        hub.ingest().publish(vec![event], false).await.err()
    })
    .await;
    let reason = until_unready(&hub, "database").await;
    assert!(reason.contains("full"), "{reason}");

    limit_pages(&database, "PRAGMA max_page_count = 1073741823").await;
    until_ready(&hub).await;
    publish(&hub, EVENT).await;
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_relay_is_named_and_restarted_until_it_makes_progress() {
    let mut settings = test_settings();
    settings.outbox.lease = Duration::from_secs(3);
    let world = start(settings).await;
    let subscriber = Subscriber::default();
    subscribe(&world.hub, "*", "all", &format!("http://{}/hook", subscriber.start().await), None).await;
    until_ready(&world.hub).await;
    world.execute("ALTER TABLE registry_version RENAME TO hidden").await;
    let id = publish(&world.hub, EVENT).await;
    let reason = until_unready(&world.hub, "event-processor").await;
    assert!(reason.contains("partition 0 of posthaste.events.order.placed"), "{reason}");
    until("the log says that the relay is restarted", async || {
        let restarts = "a relay makes no progress and is restarted relay=\"event-processor\"";
        log_lines().into_iter().find(|line| line.contains("ERROR") && line.contains(restarts))
    })
    .await;
    assert_counted(r#"posthaste_relay_restarts_total{relay="event-processor"}"#);

    world.execute("ALTER TABLE hidden RENAME TO registry_version").await;
    assert_eq!(header(&subscriber.wait_for(1).await[0].0, "webhook-id"), id);
    until_ready(&world.hub).await;
    world.hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_whose_position_is_lost_is_named_until_an_operator_resets_it() {
    let folder = tempfile::tempdir().unwrap();
    let subscriber = Subscriber::default();
    let hub = open(folder.path(), test_settings()).await;
    subscribe(&hub, "*", "all", &format!("http://{}/hook", subscriber.start().await), None).await;
    publish(&hub, EVENT).await;
    subscriber.wait_for(1).await;
    hub.stop().await;
    // As if the records that the group has not done were removed.
    execute(folder.path(), "UPDATE log_group SET watermark = 1000 WHERE group_name = 'event-processor'").await;

    let hub = open(folder.path(), test_settings()).await;
    let waits = publish(&hub, EVENT).await;
    let readiness = hub.readiness().await;
    let PartStatus::Degraded(reason) = &readiness.parts["event-processor"] else { panic!("{readiness:?}") };
    assert!(readiness.is_ready() && reason.contains("partition 0 of posthaste.events.order.placed"), "{reason}");
    let topic = "posthaste.events.order.placed";
    let topics = hub.topics().await.unwrap();
    let shown = topics.items.iter().find(|shown| shown.topic == topic).unwrap();
    assert!(shown.partitions[0].groups[0].position_lost, "{shown:?}");
    // Events of other types are delivered meanwhile.
    let other = publish(&hub, r#"{"eventType":"order.paid","sourceService":"shop","payload":1}"#).await;
    assert_eq!(header(&subscriber.wait_for(2).await[1].0, "webhook-id"), other);

    let reset = |group: &str| {
        let (group, topic) = (group.to_owned(), topic.to_owned());
        Reset { topic, group, partition: Some(0), to: ResetTo::Earliest }
    };
    assert_eq!(hub.reset_position(&reset("nobody")).await.unwrap(), 0);
    assert_eq!(hub.reset_position(&reset("event-processor")).await.unwrap(), 1);
    until("the event that waited arrives", async || {
        subscriber.received().iter().any(|(headers, _)| header(headers, "webhook-id") == waits).then_some(())
    })
    .await;
    until("nothing is degraded", async || (!hub.readiness().await.is_degraded()).then_some(())).await;
    hub.stop().await;
}
