use std::time::Duration;

use posthaste_api::EventIn;
use posthaste_hub::{Hub, PartStatus};
use posthaste_sql::sqlite::HubDatabase;

use crate::support::{Subscriber, header, open_database, open_on, publish, start, subscribe, test_settings, until};

const EVENT: &str = r#"{"eventType":"order.placed","sourceService":"shop","payload":1}"#;

/// Waits until the hub is not ready because of this part. Returns the reason.
async fn until_unready(hub: &Hub, part: &str) -> String {
    until("readiness fails", async || {
        let parts = hub.readiness().await.parts;
        let mut unready = parts.into_iter().filter_map(|(name, status)| match status {
            PartStatus::Ready => None,
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
async fn readiness_names_a_stalled_relay_until_it_makes_progress() {
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

    world.execute("ALTER TABLE hidden RENAME TO registry_version").await;
    assert_eq!(header(&subscriber.wait_for(1).await[0].0, "webhook-id"), id);
    until_ready(&world.hub).await;
    world.hub.stop().await;
}
