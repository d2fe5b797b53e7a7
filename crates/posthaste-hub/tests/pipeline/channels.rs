use posthaste_api::EventIn;
use posthaste_core::Event;
use posthaste_hub::{Accepted, ChannelError, Hub};

use std::time::Duration;

use crate::support::{
    Subscriber, ask, assert_counted, execute, header, open, publish, start, subscribe, test_settings, until,
};

fn event(json: &str) -> Event {
    serde_json::from_str::<EventIn>(json).unwrap().validate().unwrap()
}

fn event_of(event_type: &str) -> Event {
    event(&format!(r#"{{"eventType":"{event_type}","sourceService":"s","payload":1}}"#))
}

/// Publishes an event of this type and expects a refusal, because `owner` owns the topic.
async fn assert_refused(hub: &Hub, event_type: &str, owner: &str) {
    let result = hub.ingest().publish(vec![event_of(event_type)], false).await.unwrap().remove(0);
    let expected = ChannelError::Collision { refused: event_type.to_owned(), existing: owner.to_owned() };
    assert!(matches!(&result, Accepted::Refused(error) if *error == expected), "{result:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_does_not_change_which_type_owns_a_topic() {
    let folder = tempfile::tempdir().unwrap();
    let subscriber = Subscriber::default();
    let hub = open(folder.path(), test_settings()).await;
    subscribe(&hub, "*", "all", &format!("http://{}/hook", subscriber.start().await), None).await;
    // Delayed, so that no topic exists for it before the restart.
    let first = r#"{"eventType":"inv.paid","sourceService":"s","deliverAfter":"1s","payload":1}"#;
    let id = publish(&hub, first).await;
    hub.stop().await;

    let hub = open(folder.path(), test_settings()).await;
    assert_refused(&hub, "inv_paid", "inv.paid").await;
    let received = subscriber.wait_for(1).await;
    assert_eq!(header(&received[0].0, "webhook-id"), id);
    hub.stop().await;
    assert_eq!(subscriber.received().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_is_not_stored_leaves_no_channel() {
    let world = start(test_settings()).await;
    let taken = publish(&world.hub, r#"{"eventType":"known","sourceService":"s","payload":1}"#).await;
    let conflict = |event_type: &str| {
        event(&format!(r#"{{"eventId":"{taken}","eventType":"{event_type}","sourceService":"s","payload":2}}"#))
    };
    // Atomic batches that are refused because of an id, a bad type name, or two types with the same topic.
    let refused = world.hub.ingest().publish(vec![event_of("a.b"), conflict("known")], true).await.unwrap();
    assert!(matches!(refused[..], [Accepted::Withheld, Accepted::Conflict]), "{refused:?}");
    let bad = Event::builder("bad name").text("1".to_owned()).build().unwrap();
    let refused = world.hub.ingest().publish(vec![event_of("a.b"), bad], true).await.unwrap();
    assert!(matches!(refused[..], [Accepted::Withheld, Accepted::Refused(_)]), "{refused:?}");
    let refused = world.hub.ingest().publish(vec![event_of("a.b"), event_of("a-_b"), event_of("a_b")], true).await;
    let refused = refused.unwrap();
    assert!(matches!(refused[..], [Accepted::Withheld, Accepted::Withheld, Accepted::Refused(_)]), "{refused:?}");
    // A single event whose id belongs to another event, before an event of another type with the same topic.
    let mixed = world.hub.ingest().publish(vec![conflict("a.b"), event_of("a_b"), event_of("a.b")], false).await;
    let mixed = mixed.unwrap();
    assert!(matches!(mixed[..], [Accepted::Conflict, Accepted::Stored, Accepted::Refused(_)]), "{mixed:?}");
    assert_refused(&world.hub, "a.b", "a_b").await;
    world.hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_inserted_by_plain_sql_owns_its_topic_before_it_is_due() {
    let folder = tempfile::tempdir().unwrap();
    let subscriber = Subscriber::default();
    let hub = open(folder.path(), test_settings()).await;
    subscribe(&hub, "*", "all", &format!("http://{}/hook", subscriber.start().await), None).await;
    let insert = "INSERT INTO outbox_event (event_id, event_type, payload, available_at)
                  VALUES ('plain', 'inv.paid', '1', strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '+2 seconds'))";
    execute(folder.path(), insert).await;
    assert_refused(&hub, "inv_paid", "inv.paid").await;
    hub.stop().await;
    let hub = open(folder.path(), test_settings()).await;
    assert_refused(&hub, "inv_paid", "inv.paid").await;
    let received = subscriber.wait_for(1).await;
    assert_eq!(header(&received[0].0, "webhook-id"), "plain");
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_limit_of_channels_also_holds_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = test_settings();
    settings.bus.max_channels = 2;
    let hub = open(folder.path(), settings.clone()).await;
    let results = hub.ingest().publish(vec![event_of("one"), event_of("two"), event_of("three")], false).await;
    let results = results.unwrap();
    assert!(matches!(results[..], [Accepted::Stored, Accepted::Stored, Accepted::Refused(_)]), "{results:?}");
    hub.stop().await;
    let hub = open(folder.path(), settings).await;
    let results = hub.ingest().publish(vec![event_of("three"), event_of("two")], false).await.unwrap();
    let limit = ChannelError::TooMany { refused: "three".to_owned(), limit: 2 };
    assert!(matches!(&results[0], Accepted::Refused(error) if *error == limit), "{results:?}");
    assert!(matches!(results[1], Accepted::Stored), "{results:?}");
    hub.stop().await;
}

/// A program that writes another type into every row must not stop the other programs.
#[tokio::test(flavor = "multi_thread")]
async fn many_types_without_a_channel_become_dead_and_stop_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = test_settings();
    settings.bus.max_channels = 2;
    let hub = open(folder.path(), settings).await;
    let subscriber = Subscriber::default();
    subscribe(&hub, "zz", "all", &format!("http://{}/hook", subscriber.start().await), None).await;
    publish(&hub, r#"{"eventType":"zz","sourceService":"s","payload":1}"#).await;
    let many = "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 500)
                INSERT INTO outbox_event (event_type, payload) SELECT 'order-' || n, '1' FROM n";
    execute(folder.path(), many).await;
    execute(folder.path(), "INSERT INTO outbox_event (event_type, payload) VALUES ('zz', '2')").await;
    subscriber.wait_for(2).await;
    let dead = "SELECT count(*) FROM outbox_event WHERE status = 3 AND last_error LIKE '%limit of 2 channels%'";
    until("all but one are dead", async || (ask::<i64>(folder.path(), dead).await == 499).then_some(())).await;
    let readiness = hub.readiness().await;
    assert!(readiness.is_ready() && !readiness.is_degraded(), "{readiness:?}");
    assert_counted("posthaste_dispatch_dead_total{relay=\"channel-discovery\"}");
    hub.stop().await;
}

/// Events behind a dead one of their aggregate wait for an operator. That is not a stall.
#[tokio::test(flavor = "multi_thread")]
async fn events_behind_a_dead_one_of_their_aggregate_do_not_make_a_server_unready() {
    let mut settings = test_settings();
    settings.outbox.ordered = true;
    settings.outbox.lease = Duration::from_secs(1);
    let world = start(settings).await;
    let insert = "INSERT INTO outbox_event (event_type, payload, aggregate_type, aggregate_id, available_at) VALUES
                  ('no topic!', '1', 'order', '1', '2026-01-01T00:00:00Z'),
                  ('order.paid', '2', 'order', '1', '2026-01-01T00:00:00Z')";
    world.execute(insert).await;
    let dead = "SELECT count(*) FROM outbox_event WHERE status = 3";
    until("the first is dead", async || (world.ask::<i64>(dead).await == 1).then_some(())).await;
    let blocked = "SELECT count(*) FROM outbox_event WHERE status = 0 AND blocked = 1";
    until("the second is blocked", async || (world.ask::<i64>(blocked).await == 1).then_some(())).await;
    // Longer than any relay may make no progress.
    let started = std::time::Instant::now();
    until("some seconds have passed", async || {
        let readiness = world.hub.readiness().await;
        assert!(readiness.is_ready(), "{readiness:?}");
        (started.elapsed() > Duration::from_secs(4)).then_some(())
    })
    .await;
    world.hub.stop().await;
}
