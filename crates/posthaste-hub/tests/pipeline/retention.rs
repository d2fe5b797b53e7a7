use std::time::Duration;

use axum::http::StatusCode;
use posthaste_api::{DeadLetterStatus, EventIn};
use posthaste_hub::{Accepted, CleanupSettings, DeadLetterFilter, Hub, Settings};
use posthaste_sql::sqlite::WAL_LIMIT;

use crate::support::{
    Subscriber, World, ask, assert_counted, log_lines, open, publish, start, subscribe, test_settings, until,
    with_fast_retries,
};

/// Settings with which nothing is kept for longer than a moment.
fn keeping_nothing() -> Settings {
    let mut settings = test_settings();
    let moment = Some(Duration::from_millis(100));
    settings.retention.outbox = moment;
    settings.retention.log = moment;
    settings.retention.quarantine = moment;
    settings
}

async fn subscribed(world: &World, event_type: &str) -> Subscriber {
    let subscriber = Subscriber::default();
    let endpoint = format!("http://{}/hook", subscriber.start().await);
    subscribe(&world.hub, event_type, "subscriber", &endpoint, None).await;
    subscriber
}

/// Publishes a round of events and waits until they have arrived, `before` others included.
async fn publish_round(hub: &Hub, subscriber: &Subscriber, before: usize) {
    let payload = "x".repeat(2_000);
    let event = || {
        let text = format!(r#"{{"eventType":"busy","sourceService":"s","payload":"{payload}"}}"#);
        serde_json::from_str::<EventIn>(&text).unwrap().validate().unwrap()
    };
    for _ in 0..ROUND / 500 {
        let accepted = hub.ingest().publish((0..500).map(|_| event()).collect(), false).await.unwrap();
        assert!(accepted.iter().all(|accepted| matches!(accepted, Accepted::Stored)));
    }
    subscriber.wait_for(before + ROUND).await;
}

/// The number of events in a round.
const ROUND: usize = 2_000;

/// However removal and delivery overlap, the pages of removed rows are used again.
#[tokio::test(flavor = "multi_thread")]
async fn the_disk_of_a_busy_server_stops_growing() {
    const ROUNDS: usize = 6;
    let (folder, subscriber) = (tempfile::tempdir().unwrap(), Subscriber::default());
    let size = |name| std::fs::metadata(folder.path().join(name)).map_or(0, |file| file.len());
    let mut keeping_all = test_settings();
    keeping_all.retention.outbox = None;
    keeping_all.retention.log = None;
    let hub = open(folder.path(), keeping_all).await;
    let endpoint = format!("http://{}/hook", subscriber.start().await);
    subscribe(&hub, "busy", "subscriber", &endpoint, None).await;
    publish_round(&hub, &subscriber, 0).await;
    hub.stop().await;
    let one_round = size("hub.db");
    assert!(one_round > ROUND as u64 * 2_000, "a round keeps its payloads: {one_round}");

    let hub = open(folder.path(), keeping_nothing()).await;
    // The last record of the bus is always kept.
    let left = "SELECT (SELECT count(*) FROM outbox_event) + (SELECT count(*) FROM log_record)";
    let all_removed = async || (ask::<i64>(folder.path(), left).await <= 1).then_some(());
    until("the first round is removed", all_removed).await;
    let mut sizes = Vec::new();
    for round in 1..=ROUNDS {
        publish_round(&hub, &subscriber, round * ROUND).await;
        until("the round is removed", all_removed).await;
        sizes.push((size("hub.db"), size("hub.db-wal")));
    }
    hub.stop().await;
    assert_eq!(subscriber.received().len(), (ROUNDS + 1) * ROUND, "each event arrived once");
    let largest = |of: fn(&(u64, u64)) -> u64| sizes.iter().map(of).max().unwrap();
    // Without removal, it would have seven rounds in the end.
    assert!(largest(|(database, _)| *database) < 2 * one_round, "it grows from {one_round}: {sizes:?}");
    assert!(largest(|(_, wal)| *wal) < 2 * WAL_LIMIT, "{sizes:?}");
    assert_counted("posthaste_sqlite_wal_bytes{database=\"hub.db\"}");
    for kind in ["outbox", "log"] {
        assert_counted(&format!("posthaste_retention_removed_total{{kind=\"{kind}\"}}"));
        assert_counted(&format!("posthaste_retention_last_run_timestamp_seconds{{kind=\"{kind}\"}}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_could_not_be_published_are_kept() {
    let world = start(keeping_nothing()).await;
    publish(&world.hub, r#"{"eventType":"t","eventId":"late","sourceService":"s","deliverAfter":"1h","payload":1}"#)
        .await;
    publish(&world.hub, r#"{"eventType":"t","eventId":"dead","sourceService":"s","deliverAfter":"1h","payload":1}"#)
        .await;
    world.execute("UPDATE outbox_event SET status = 3, done_at = '2000-01-01T00:00:00Z' WHERE event_id = 'dead'").await;
    publish(&world.hub, r#"{"eventType":"t","eventId":"done","sourceService":"s","payload":1}"#).await;
    let rows = "SELECT group_concat(event_id ORDER BY event_id) FROM outbox_event";
    until("the done row is removed", async || (world.ask::<String>(rows).await == "dead,late").then_some(())).await;
    world.hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unhandled_records_that_leave_the_quarantine_are_reported() {
    let world = start(keeping_nothing()).await;
    world
        .execute(
            "INSERT INTO quarantined_record (id, group_name, topic, partition, \"offset\", key, reason, replayable,
                 status)
             VALUES ('a', 'expired-group', 'expired.topic', 0, 1, 'k', 'r', 1, 0),
                 ('b', 'expired-group', 'expired.topic', 0, 2, 'k', 'r', 1, 1),
                 ('c', 'expired-group', 'expired.topic', 0, 3, 'k', 'r', 1, 2);
             INSERT INTO quarantined_value (record_id, value) VALUES ('a', x'00'), ('b', x'00'), ('c', x'00')",
        )
        .await;
    let left = "SELECT (SELECT count(*) FROM quarantined_record) + (SELECT count(*) FROM quarantined_value)";
    until("all are removed", async || (world.ask::<i64>(left).await == 0).then_some(())).await;
    world.hub.stop().await;
    let lines = log_lines();
    let warnings: Vec<_> = lines.iter().filter(|line| line.contains("expired-group")).collect();
    assert!(matches!(&warnings[..], [line] if line.contains("WARN") && line.contains("records=1")), "{warnings:?}");
    assert_counted(r#"posthaste_quarantine_expired_total{group="expired-group",topic="expired.topic"}"#);
    assert_counted(r#"posthaste_retention_removed_total{kind="quarantine"}"#);
}

#[tokio::test(flavor = "multi_thread")]
async fn delivered_dead_letters_are_removed_only_if_cleanup_is_enabled() {
    for enabled in [false, true] {
        let mut settings = with_fast_retries();
        settings.dlt.cleanup = CleanupSettings { enabled, interval: Duration::from_millis(100) };
        let world = start(settings).await;
        let (recovering, down) = (subscribed(&world, "recovering").await, subscribed(&world, "down").await);
        recovering.answer_first(4, StatusCode::SERVICE_UNAVAILABLE);
        down.answer(StatusCode::SERVICE_UNAVAILABLE);
        publish(&world.hub, r#"{"eventType":"down","sourceService":"s","payload":1}"#).await;
        publish(&world.hub, r#"{"eventType":"recovering","sourceService":"s","payload":1}"#).await;
        let letters = async || {
            let all = DeadLetterFilter { status: None, ..DeadLetterFilter::default() };
            let page = world.hub.dead_letters(&all).await.unwrap();
            page.items.into_iter().map(|letter| (letter.event_type, letter.status)).collect::<Vec<_>>()
        };
        let history = "SELECT count(*) FROM retry_history WHERE error_code IS NULL";
        recovering.wait_for(5).await;
        until("the other dead letter failed", async || {
            letters().await.contains(&("down".to_owned(), DeadLetterStatus::Failed)).then_some(())
        })
        .await;
        if enabled {
            until("the delivered one is removed", async || (letters().await.len() == 1).then_some(())).await;
            assert_eq!(world.ask::<i64>(history).await, 0, "its history is removed with it");
            assert_eq!(world.ask::<i64>("SELECT count(*) FROM dlt_payload").await, 1);
            assert_counted(r#"posthaste_retention_removed_total{kind="dlt"}"#);
        } else {
            until("it is delivered", async || (world.ask::<i64>(history).await == 1).then_some(())).await;
            assert_eq!(letters().await.len(), 2);
        }
        world.hub.stop().await;
    }
}
