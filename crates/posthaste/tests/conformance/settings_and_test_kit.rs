//! P: settings as data, typed listeners, and the test kit.

use std::sync::Arc;
use std::time::Duration;

use posthaste::{
    Event, FaultKind, Listeners, Mode, Outbox, OutboxStatus, RegistrationError, Retention, RetryPolicy, Settings,
    StartError, Unroutable,
};
use posthaste_testing::{HookCall, MemoryDatabase, RecordingHook};
use serde::Deserialize;

use crate::harness::{
    Calls, Gate, Harness, Metrics, PATIENCE, all_done, events, on_every_store, row_when, until, write,
};

on_every_store! {
    p1_an_outbox_is_built_from_settings,
    p3_a_typed_listener_gets_its_payload,
    p4_metrics_need_no_switch_and_no_recorder,
}

async fn p1_an_outbox_is_built_from_settings<H: Harness>(db: H) {
    let settings = r#"{"table": "shop_outbox", "mode": "multi_node", "workers": 2, "poll_interval": 60000,
        "purge": {"done": 0, "interval": 50}}"#;
    let settings: Settings = serde_json::from_str(settings).unwrap();
    let calls = Calls::default();
    // A builder call after the settings overrides them.
    let builder = Outbox::new(db.pool().await).settings(settings).table("own_outbox").listeners(calls.listeners());
    let outbox = builder.start().await.unwrap();
    assert_eq!(outbox.table().store_name(), "own_outbox");
    let ids = write(&outbox, &events(1)).await;
    calls.wait_for(1).await;
    until("purging is on in every mode", async || outbox.find(&ids[0]).await.unwrap().is_none()).await;
    outbox.close().await;
}

/// Lets a test read the table name without importing the store's trait.
trait StoreName {
    fn store_name(&self) -> &str;
}

impl<S: posthaste_core::outbox::Store> StoreName for posthaste_core::outbox::Table<S> {
    fn store_name(&self) -> &str {
        self.store().table().as_str()
    }
}

#[test]
fn p2_settings_have_keys_and_defaults() {
    let defaults: Settings = serde_json::from_str("{}").unwrap();
    assert_eq!(defaults, Settings::default());
    let Settings { table, mode, workers, hot_queue, cold_queue, batch_size, poll_interval, .. } = defaults.clone();
    assert_eq!(
        (table.as_str(), mode, workers, hot_queue, cold_queue),
        ("outbox_event", Mode::SingleNode, 4, 1_000, 1_000)
    );
    assert_eq!((batch_size, poll_interval), (500, None));
    let Settings { skip_recent, lease, drain, retry, unroutable, purge, metrics_prefix, .. } = defaults;
    assert_eq!((skip_recent, lease, drain), (Duration::ZERO, Duration::from_secs(30), Duration::from_secs(5)));
    let (base, max) = (Duration::from_millis(200), Duration::from_secs(60));
    assert_eq!(retry, RetryPolicy::Exponential { base, max, max_attempts: Some(10) });
    assert_eq!((unroutable, purge, metrics_prefix.as_str()), (Unroutable::Dead, None, "posthaste"));
    let all = r#"{"table": "t", "mode": {"ordered": "skip"}, "workers": 1, "hot_queue": 2, "cold_queue": 3,
        "batch_size": 4, "poll_interval": 5, "skip_recent": 6, "lease": 7000, "drain": 8,
        "retry": {"kind": "fixed", "interval": 9, "max_attempts": 3},
        "unroutable": {"leave": {"grace": 10}},
        "purge": {"done": 11, "dead": 12, "everything": 13, "batch_size": 14, "interval": 15}, "metrics_prefix": "p"}"#;
    let all: Settings = serde_json::from_str(all).unwrap();
    let again: Settings = serde_json::from_str(&serde_json::to_string(&all).unwrap()).unwrap();
    assert_eq!(again, all);
    assert_eq!((all.skip_recent, all.lease), (Duration::from_millis(6), Duration::from_secs(7)));
    let interval = Duration::from_millis(9);
    assert_eq!(all.retry, RetryPolicy::Fixed { interval, max_attempts: Some(3) });
    let spelt = r#"{"kind": "exponential", "base": 100, "max": 2000}"#;
    let (base, max) = (Duration::from_millis(100), Duration::from_secs(2));
    assert_eq!(RetryPolicy::Exponential { base, max, max_attempts: None }, serde_json::from_str(spelt).unwrap());
    assert_eq!(all.unroutable, Unroutable::Leave { grace: Duration::from_millis(10) });
    assert_eq!(all.purge.unwrap().dead, Some(Duration::from_millis(12)));
    assert!(serde_json::from_str::<Settings>(r#"{"polling": 5}"#).is_err(), "an unknown key is refused");
    assert!(serde_json::from_str::<Settings>(r#"{"table": "a b"}"#).is_err());
    assert_eq!(Retention::default(), serde_json::from_str("{}").unwrap());
}

#[derive(Deserialize)]
struct OrderPlaced {
    id: u64,
}

async fn p3_a_typed_listener_gets_its_payload<H: Harness>(db: H) {
    let calls = Calls::default();
    let (of_aggregate, global) = (calls.clone(), calls.clone());
    let outbox = Outbox::new(db.pool().await)
        .listen_aggregate("order", "placed", move |order: OrderPlaced, event: Arc<Event>| {
            assert_eq!(order.id, 7);
            of_aggregate.add(event);
            async {}
        })
        .listen("placed", move |number: u64, event: Arc<Event>| {
            assert_eq!(number, 8);
            global.add(event);
            async {}
        })
        .start()
        .await
        .unwrap();
    let event = |text: &str| Event::text("placed", text);
    let events = [event("{\"id\": 7}").aggregate("order", 1), event("8"), event("\"no number\"")];
    let ids = write(&outbox, &events.map(|event| event.build().unwrap())).await;
    all_done(&outbox, &ids[..2]).await;
    let dead = row_when(&outbox, &ids[2], |row| row.status == OutboxStatus::Dead).await;
    outbox.close().await;
    assert!(
        dead.last_error.unwrap().starts_with("payload: "),
        "a payload that cannot be parsed is a permanent failure"
    );
    assert_eq!(calls.len(), 2);
    for (event_type, is_empty) in [("", true), ("placed", false)] {
        let builder = Outbox::new(db.pool().await).on("placed", |_| async {}).on(event_type, |_| async {});
        let Some(StartError::Listener(error)) = builder.start().await.err() else { panic!("the start is refused") };
        assert_eq!(error == RegistrationError::EmptyType, is_empty);
    }
}

async fn p4_metrics_need_no_switch_and_no_recorder<H: Harness>(db: H) {
    let calls = Calls::default();
    let silent = Outbox::new(db.pool().await).table("silent").listeners(calls.listeners()).start().await.unwrap();
    let ids = write(&silent, &events(1)).await;
    all_done(&silent, &ids).await;
    silent.close().await;
    // Metrics go to the recorder of the service; no setting switches them on.
    let metrics = Metrics::default();
    let listening = metrics.listening();
    let settings = Settings { metrics_prefix: "shop".to_owned(), ..Settings::default() };
    let builder = Outbox::new(db.pool().await).settings(settings).listeners(calls.listeners());
    let outbox = builder.start().await.unwrap();
    drop(listening);
    write(&outbox, &events(1)).await;
    until("the delivery is counted", async || metrics.counter("shop_dispatch_success_total") == 1).await;
    outbox.close().await;
    assert!(metrics.names().iter().all(|name| name.starts_with("shop_")));
}

#[tokio::test]
async fn p5_a_service_is_tested_without_a_database() {
    let (database, hook, calls) = (MemoryDatabase::new(), RecordingHook::new(), Calls::default());
    let builder = Outbox::new(database.clone()).hook(hook.clone()).listeners(calls.listeners());
    let outbox = builder.start().await.unwrap();
    let ids = write(&outbox, &events(2)).await;
    all_done(&outbox, &ids).await;
    let rows = database.rows("outbox_event");
    assert_eq!(rows.iter().map(|row| row.event_id.clone()).collect::<Vec<_>>(), ids);
    assert!(rows.iter().all(|row| row.status == OutboxStatus::Done));
    drop(outbox.begin().await.unwrap());
    assert_eq!((database.commits(), database.rollbacks()), (1, 1));
    assert!(matches!(hook.calls()[..], [HookCall::BeforeWrite(_), HookCall::AfterWrite(_), HookCall::AfterCommit(_)]));
    database.fail_commits(1);
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write(&mut transaction, crate::harness::event()).await.unwrap();
    assert_eq!(transaction.commit().await.unwrap_err().kind(), FaultKind::Transient);
    outbox.close().await;
    assert_eq!((database.rows("outbox_event").len(), calls.len()), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn p5_a_test_controls_the_clock() {
    let (database, calls) = (MemoryDatabase::new(), Calls::default());
    let outbox = Outbox::new(database).listeners(calls.listeners()).start().await.unwrap();
    let tomorrow = Event::text("t", "{}").deliver_after(Duration::from_secs(24 * 60 * 60)).build().unwrap();
    let began = tokio::time::Instant::now();
    write(&outbox, &[tomorrow]).await;
    while calls.len() == 0 {
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
    assert!(began.elapsed() >= Duration::from_secs(24 * 60 * 60), "a day of the paused clock");
    outbox.close().await;
}

/// The tasks of an outbox run on the runtime of the service and end with it, even while listeners run.
#[test]
fn p6_workers_do_not_keep_a_process_alive() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let calls = Calls::default();
    let outbox = runtime.block_on(async {
        let listeners: Listeners = calls.gated_listeners(&Gate::closed());
        let outbox = Outbox::new(MemoryDatabase::new()).listeners(listeners).start().await.unwrap();
        write(&outbox, &events(10)).await;
        calls.wait_for(4).await;
        outbox
    });
    let began = std::time::Instant::now();
    drop(runtime);
    assert!(began.elapsed() < PATIENCE, "the runtime ended while four listeners ran");
    drop(outbox);
    assert_eq!(calls.len(), 4);
}
