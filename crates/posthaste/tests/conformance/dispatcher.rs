//! H: how the dispatcher delivers events to listeners and settles them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use chrono::{TimeDelta, Utc};
use posthaste::{
    Event, Failure, Interceptor, Listeners, Mode, Outbox, OutboxStatus, Outcome, RetryPolicy, Settings, StartError,
};
use posthaste_core::Source;

use crate::harness::{
    Calls, Gate, HOUR, Harness, Metrics, PATIENCE, all_done, claim, event, events, node, on_every_store, outbox, retry,
    row, row_when, settle, until, watched, write, write_plain, writer,
};

on_every_store! {
    h1_without_workers_nothing_is_delivered,
    h2_a_full_hot_queue_or_a_closed_dispatcher_leaves_events_unclaimed,
    h3_an_event_reaches_its_listener_and_is_done_once,
    h4_an_event_without_a_listener_is_dead_at_once,
    h5_a_failure_is_retried_by_the_policy_until_the_budget_is_spent,
    h6_a_listener_returns_nothing_a_result_or_an_outcome,
    h7_a_failure_may_set_its_own_delay,
    h8_a_plain_function_may_listen,
    h9_interceptors_run_before_and_after_the_listener,
    h10_a_failed_settlement_is_repeated_without_calling_the_listener_again,
    h11_an_event_in_flight_is_not_delivered_a_second_time,
    h12_many_workers_deliver_every_event_once,
    h13_hot_events_go_before_cold_ones_two_to_one,
    h14_close_drains_and_releases_the_rest,
    h15_full_and_delayed_events_skip_the_hot_queue_and_are_counted,
    h16_a_claimed_event_continues_from_its_stored_attempts,
    h17_deliveries_are_measured,
}

const FAR: Duration = Duration::from_secs(60);

fn at_once(max_attempts: u32) -> RetryPolicy {
    RetryPolicy::Fixed { interval: Duration::ZERO, max_attempts: Some(max_attempts) }
}

/// Listeners for `t` that note the call and return the same outcome each time.
fn answering(calls: &Calls, outcome: Outcome) -> Listeners {
    let calls = calls.clone();
    let listener = move |event| {
        let (calls, outcome) = (calls.clone(), outcome.clone());
        async move {
            calls.add(event);
            outcome
        }
    };
    Listeners::new().on("t", listener).unwrap()
}

fn failing(calls: &Calls) -> Listeners {
    answering(calls, Outcome::Failed(Failure::transient("503", "down")))
}

#[tokio::test]
async fn h1_invalid_dispatcher_settings_are_refused() {
    for (name, settings) in [
        ("retry.max_attempts", Settings { retry: at_once(0), ..Settings::default() }),
        ("hot_queue", Settings { hot_queue: 0, ..Settings::default() }),
        ("cold_queue", Settings { cold_queue: 0, ..Settings::default() }),
    ] {
        let database = posthaste_testing::MemoryDatabase::new();
        let refused = Outbox::new(database).settings(settings).on("t", |_| async {}).start().await;
        assert!(matches!(refused.err(), Some(StartError::Setting(bad)) if bad.setting() == name));
    }
    let database = posthaste_testing::MemoryDatabase::new();
    assert!(matches!(Outbox::new(database).start().await.err(), Some(StartError::NoListener)));
}

/// Collects the warnings of this thread.
struct Warnings(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{field}={value:?} ");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }

    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

async fn h1_without_workers_nothing_is_delivered<H: Harness>(db: H) {
    let (calls, warnings) = (Calls::default(), Arc::new(Mutex::new(Vec::new())));
    let listening = tracing::subscriber::set_default(Warnings(warnings.clone()));
    let outbox = outbox(&db, &calls, |builder| builder.mode(Mode::MultiNode).workers(0)).await;
    drop(listening);
    assert!(warnings.lock().unwrap().iter().any(|text| text.contains("no workers")), "{warnings:?}");
    let ids = write(&outbox, &events(1)).await;
    assert!(row(&outbox, &ids[0]).await.locked_by.is_some(), "pre-claimed, and no worker delivers it");
    outbox.dead().count(&posthaste::DeadFilter::all()).await.unwrap();
    assert_eq!((row(&outbox, &ids[0]).await.status, calls.len()), (OutboxStatus::New, 0));
}

async fn h2_a_full_hot_queue_or_a_closed_dispatcher_leaves_events_unclaimed<H: Harness>(db: H) {
    let (calls, gate, metrics) = (Calls::default(), Gate::closed(), Metrics::default());
    let (pool, call_log) = watched(&db).await;
    call_log.refuse("claim", usize::MAX);
    let drain = Duration::from_millis(10);
    let settings = Settings { workers: 1, hot_queue: 2, mode: Mode::MultiNode, drain, ..Settings::default() };
    let listening = metrics.listening();
    let builder = Outbox::new(pool).settings(settings).listeners(calls.gated_listeners(&gate));
    let outbox = builder.start().await.unwrap();
    drop(listening);
    let ids = write(&outbox, &events(3)).await;
    calls.wait_for(1).await;
    for (id, is_claimed) in ids.iter().zip([true, true, false]) {
        assert_eq!(row(&outbox, id).await.locked_by.is_some(), is_claimed);
    }
    assert_eq!(metrics.counter("posthaste_enqueue_hot_total"), 2);
    assert_eq!(metrics.counter("posthaste_enqueue_hot_dropped_total"), 1);
    assert_eq!(metrics.gauge("posthaste_in_flight"), Some(2.0));
    assert!(metrics.gauge("posthaste_queue_hot_depth").unwrap() <= 2.0);
    outbox.close().await;
    let late = write(&outbox, &events(1)).await;
    let late = row_when(&outbox, &late[0], |row| row.locked_by.is_none()).await;
    assert_eq!((late.status, metrics.counter("posthaste_enqueue_hot_total")), (OutboxStatus::New, 2));
    gate.open();
}

async fn h3_an_event_reaches_its_listener_and_is_done_once<H: Harness>(db: H) {
    let (pool, call_log) = watched(&db).await;
    let (right, wrong) = (Calls::default(), Calls::default());
    let listener = |calls: &Calls| {
        let calls = calls.clone();
        move |event| {
            let calls = calls.clone();
            async move { calls.add(event) }
        }
    };
    let outbox = Outbox::new(pool)
        .on_aggregate("order", "placed", listener(&right))
        .on_aggregate("order", "paid", listener(&wrong))
        .on("placed", listener(&wrong))
        .start()
        .await
        .unwrap();
    let placed = Event::text("placed", "{\"id\": 7}").aggregate("order", 7).build().unwrap();
    let ids = write(&outbox, &[placed]).await;
    all_done(&outbox, &ids).await;
    outbox.close().await;
    assert_eq!((right.ids(), wrong.len()), (ids, 0));
    assert_eq!(right.events()[0].payload().as_bytes(), b"{\"id\": 7}");
    assert_eq!(call_log.calls("settle"), [1]);
}

async fn h4_an_event_without_a_listener_is_dead_at_once<H: Harness>(db: H) {
    let calls = Calls::default();
    let outbox = outbox(&db, &calls, |builder| builder).await;
    let unknown = Event::text("unknown", "{}").aggregate("order", 7).build().unwrap();
    let ids = write(&outbox, &[unknown]).await;
    let dead = row_when(&outbox, &ids[0], |row| row.status == OutboxStatus::Dead).await;
    outbox.close().await;
    assert_eq!(dead.attempts, 0);
    let error = dead.last_error.unwrap();
    assert!(error.starts_with("unroutable: ") && error.contains("unknown") && error.contains("order"), "{error}");
}

async fn h5_a_failure_is_retried_by_the_policy_until_the_budget_is_spent<H: Harness>(db: H) {
    let calls = Calls::default();
    let wait = RetryPolicy::Fixed { interval: HOUR, max_attempts: Some(2) };
    let outbox = Outbox::new(db.pool().await).listeners(failing(&calls)).retry(wait).start().await.unwrap();
    let ids = write(&outbox, &events(1)).await;
    let waiting = row_when(&outbox, &ids[0], |row| row.status == OutboxStatus::Retry).await;
    assert_eq!((waiting.attempts, waiting.last_error.as_deref()), (1, Some("503: down")));
    assert!((waiting.available_at - Utc::now() - TimeDelta::hours(1)).num_seconds().abs() < 10);
    outbox.close().await;
    assert_eq!(calls.len(), 1);
    for (max_attempts, attempts_at_the_end) in [(1, 0), (2, 1), (4, 3)] {
        let calls = Calls::default();
        let builder = Outbox::new(db.pool().await).table(format!("h5_{max_attempts}")).listeners(failing(&calls));
        let outbox = builder.retry(at_once(max_attempts)).start().await.unwrap();
        let ids = write(&outbox, &events(1)).await;
        let dead = row_when(&outbox, &ids[0], |row| row.status == OutboxStatus::Dead).await;
        outbox.close().await;
        assert_eq!((calls.len(), dead.attempts), (max_attempts as usize, attempts_at_the_end));
    }
}

async fn h6_a_listener_returns_nothing_a_result_or_an_outcome<H: Harness>(db: H) {
    let wait = Duration::from_secs(30);
    let outbox = Outbox::new(db.pool().await)
        .on("delivered", |_| async { Outcome::Delivered })
        .on("nothing", |_| async {})
        .on("fine", |_| async { Ok::<(), Failure>(()) })
        .on("snoozed", move |_| async move { Outcome::Snoozed { wait } })
        .start()
        .await
        .unwrap();
    let event = |event_type: &str| Event::text(event_type, "{}").build().unwrap();
    let ids = write(&outbox, &["delivered", "nothing", "fine", "snoozed"].map(event)).await;
    all_done(&outbox, &ids[..3]).await;
    let snoozed = row_when(&outbox, &ids[3], |row| row.available_at - row.created_at > TimeDelta::seconds(20)).await;
    outbox.close().await;
    assert_eq!((snoozed.status, snoozed.attempts, snoozed.last_error), (OutboxStatus::New, 0, None));
    let until_due = snoozed.available_at - Utc::now();
    assert!((TimeDelta::seconds(15)..=TimeDelta::seconds(31)).contains(&until_due), "{until_due}");
    assert!(snoozed.available_at - snoozed.created_at >= TimeDelta::seconds(29));
}

async fn h7_a_failure_may_set_its_own_delay<H: Harness>(db: H) {
    let calls = Calls::default();
    let five_minutes = Failure::transient("429", "slow down").cause("quota").retry_after(Duration::from_secs(300));
    let listeners = answering(&calls, Outcome::Failed(five_minutes));
    let outbox = Outbox::new(db.pool().await).listeners(listeners).start().await.unwrap();
    let ids = write(&outbox, &events(1)).await;
    let waiting = row_when(&outbox, &ids[0], |row| row.status == OutboxStatus::Retry).await;
    outbox.close().await;
    assert_eq!((waiting.attempts, waiting.last_error.as_deref()), (1, Some("429: slow down (quota)")));
    assert!((waiting.available_at - Utc::now() - TimeDelta::minutes(5)).num_seconds().abs() < 10);
    // A delay of zero is valid, too, and the attempts still count against the budget.
    let calls = Calls::default();
    let no_wait = Failure::transient("429", "now").retry_after(Duration::ZERO);
    let builder = Outbox::new(db.pool().await).table("h7").listeners(answering(&calls, Outcome::Failed(no_wait)));
    let policy = RetryPolicy::Fixed { interval: HOUR, max_attempts: Some(3) };
    let outbox = builder.retry(policy).start().await.unwrap();
    let ids = write(&outbox, &events(1)).await;
    row_when(&outbox, &ids[0], |row| row.status == OutboxStatus::Dead).await;
    outbox.close().await;
    assert_eq!(calls.len(), 3);
}

async fn greet(_: Arc<Event>) {}

async fn h8_a_plain_function_may_listen<H: Harness>(db: H) {
    let outbox = Outbox::new(db.pool().await).on("t", greet).start().await.unwrap();
    let ids = write(&outbox, &events(1)).await;
    all_done(&outbox, &ids).await;
    outbox.close().await;
}

type Log = Arc<Mutex<Vec<String>>>;

/// An interceptor that logs its calls and fails where the test wants it to.
struct Witness {
    name: &'static str,
    log: Log,
    fails_before: bool,
    panics_after: bool,
}

#[async_trait::async_trait]
impl Interceptor for Witness {
    async fn before(&self, _: &Event) -> Result<(), Failure> {
        self.log.lock().unwrap().push(format!("before {}", self.name));
        match self.fails_before {
            true => Err(Failure::transient("witness", "no")),
            false => Ok(()),
        }
    }

    async fn after(&self, _: &Event, failure: Option<&Failure>) {
        let code = failure.map_or("nothing", |failure| failure.code.as_ref()).to_owned();
        self.log.lock().unwrap().push(format!("after {} {code}", self.name));
        assert!(!self.panics_after, "the test wants a panic");
    }
}

async fn h9_interceptors_run_before_and_after_the_listener<H: Harness>(db: H) {
    for (name, fails_before, listener_fails, status, expected) in [
        (
            "fine",
            false,
            false,
            OutboxStatus::Done,
            &["before a", "before b", "listener", "after b nothing", "after a nothing"][..],
        ),
        (
            "failing",
            false,
            true,
            OutboxStatus::Dead,
            &["before a", "before b", "listener", "after b 503", "after a 503"],
        ),
        ("before", true, false, OutboxStatus::Dead, &["before a", "before b", "after a witness"]),
    ] {
        let log = Log::default();
        let witness = |name, fails_before, panics_after| Witness { name, log: log.clone(), fails_before, panics_after };
        let seen = log.clone();
        let listeners = Listeners::new().on("t", move |_| {
            seen.lock().unwrap().push("listener".to_owned());
            async move { if listener_fails { Err(Failure::transient("503", "down")) } else { Ok(()) } }
        });
        let builder = Outbox::new(db.pool().await).table(format!("h9_{name}")).retry(at_once(1));
        let builder = builder.listeners(listeners.unwrap()).intercept(witness("a", false, true));
        let outbox = builder.intercept(witness("b", fails_before, false)).start().await.unwrap();
        let ids = write(&outbox, &events(1)).await;
        row_when(&outbox, &ids[0], |row| row.status == status).await;
        outbox.close().await;
        assert_eq!(*posthaste_core::lock(&log), expected);
    }
}

async fn h10_a_failed_settlement_is_repeated_without_calling_the_listener_again<H: Harness>(db: H) {
    let (pool, call_log) = watched(&db).await;
    let calls = Calls::default();
    let builder = Outbox::new(pool).listeners(calls.listeners()).poll_interval(Duration::from_millis(10));
    call_log.refuse("settle", 3);
    let outbox = builder.start().await.unwrap();
    let ids = write(&outbox, &events(1)).await;
    let done = row_when(&outbox, &ids[0], |row| row.status == OutboxStatus::Done).await;
    outbox.close().await;
    assert_eq!((done.attempts, done.last_error, calls.len()), (0, None, 1));
    assert_eq!(call_log.calls("settle"), [1, 1, 1, 1]);
}

async fn h11_an_event_in_flight_is_not_delivered_a_second_time<H: Harness>(db: H) {
    let (calls, gate) = (Calls::default(), Gate::closed());
    let (seen, passed) = (calls.clone(), gate.clone());
    let (pool, call_log) = watched(&db).await;
    let builder = Outbox::new(pool).poll_interval(FAR).on("t", move |event| {
        let (calls, gate) = (seen.clone(), passed.clone());
        async move {
            calls.add(event);
            gate.pass().await;
            Outcome::Failed(Failure::permanent("410", "gone"))
        }
    });
    let outbox = builder.start().await.unwrap();
    let ids = write(&outbox, &events(1)).await;
    calls.wait_for(1).await;
    for _ in 0..20 {
        let asked = call_log.calls("claim").len();
        outbox.committed();
        until("the table was polled again", async || call_log.calls("claim").len() > asked).await;
    }
    assert_eq!(calls.len(), 1, "no second delivery while the first is in flight");
    gate.open();
    row_when(&outbox, &ids[0], |row| row.status == OutboxStatus::Dead).await;
    assert!(outbox.dead().replay(&ids[0]).await.unwrap());
    calls.wait_for(2).await;
    row_when(&outbox, &ids[0], |row| row.status == OutboxStatus::Dead).await;
    outbox.close().await;
    assert_eq!(calls.counts()[&ids[0]], 2, "delivered again after the first delivery ended");
}

async fn h12_many_workers_deliver_every_event_once<H: Harness>(db: H) {
    for (workers, hot, cold) in [(4, 50, 0), (2, 20, 10)] {
        let calls = Calls::default();
        let settings = Settings { workers, poll_interval: Some(FAR), ..Settings::default() };
        let builder = Outbox::new(db.pool().await).settings(settings).table(format!("h12_{workers}"));
        let outbox = builder.listeners(calls.listeners()).start().await.unwrap();
        let mut ids = write_plain(&db, &outbox, &events(cold)).await;
        for _ in 0..hot {
            ids.extend(write(&outbox, &[event()]).await);
        }
        all_done(&outbox, &ids).await;
        outbox.close().await;
        assert_eq!(calls.counts(), ids.into_iter().map(|id| (id, 1)).collect());
    }
}

async fn h13_hot_events_go_before_cold_ones_two_to_one<H: Harness>(db: H) {
    let (calls, gate) = (Calls::default(), Gate::closed());
    let builder = Outbox::new(db.pool().await).mode(Mode::MultiNode).workers(1).poll_interval(FAR);
    let outbox = builder.listeners(calls.gated_listeners(&gate)).start().await.unwrap();
    write(&outbox, &[event()]).await;
    calls.wait_for(1).await;
    let cold = write_plain(&db, &outbox, &events(4)).await;
    for id in &cold {
        row_when(&outbox, id, |row| row.locked_by.is_some()).await;
    }
    // A leased row may not be in the cold queue yet. When the next row is leased, the first four rows are in the queue.
    let last = write_plain(&db, &outbox, &events(1)).await;
    row_when(&outbox, &last[0], |row| row.locked_by.is_some()).await;
    let hot = write(&outbox, &events(6)).await;
    gate.open();
    all_done(&outbox, &[cold.clone(), hot.clone()].concat()).await;
    outbox.close().await;
    let order: String = calls.ids()[1..].iter().map(|id| if hot.contains(id) { 'h' } else { 'c' }).collect();
    assert!(order.starts_with('h'), "{order}");
    let while_both_wait = &order[..order.rfind('h').unwrap()];
    assert!(!while_both_wait.contains("hhh") && !while_both_wait.contains("cc"), "{order}");
}

async fn h14_close_drains_and_releases_the_rest<H: Harness>(db: H) {
    let calls = Calls::default();
    let settings = Settings { mode: Mode::MultiNode, workers: 1, drain: PATIENCE, ..Settings::default() };
    let builder = Outbox::new(db.pool().await).settings(settings).table("drained");
    let slow = calls.slow_listeners(Duration::from_millis(20));
    let outbox = builder.listeners(slow).start().await.unwrap();
    let ids = write(&outbox, &events(10)).await;
    outbox.close().await;
    outbox.close().await;
    assert_eq!(calls.ids(), ids, "queued events are delivered");
    assert_eq!(row(&outbox, &ids[9]).await.status, OutboxStatus::Done);

    let (calls, gate) = (Calls::default(), Gate::closed());
    let drain = Duration::from_millis(50);
    let settings = Settings { mode: Mode::MultiNode, workers: 1, drain, ..Settings::default() };
    let builder = Outbox::new(db.pool().await).settings(settings).listeners(calls.gated_listeners(&gate));
    let stuck = builder.start().await.unwrap();
    let ids = write(&stuck, &events(3)).await;
    calls.wait_for(1).await;
    stuck.close().await;
    for id in &ids {
        let row = row(&stuck, id).await;
        assert_eq!((row.status, row.attempts, row.locked_by, row.lease_losses), (OutboxStatus::New, 0, None, 0));
    }
}

async fn h15_full_and_delayed_events_skip_the_hot_queue_and_are_counted<H: Harness>(db: H) {
    let (calls, gate, metrics) = (Calls::default(), Gate::closed(), Metrics::default());
    let settings = Settings { workers: 1, hot_queue: 2, poll_interval: Some(FAR), ..Settings::default() };
    let listening = metrics.listening();
    let builder = Outbox::new(db.pool().await).settings(settings).listeners(calls.gated_listeners(&gate));
    let outbox = builder.start().await.unwrap();
    drop(listening);
    let delayed = Event::text("t", "{}").deliver_after(HOUR).build().unwrap();
    let batch = [event(), delayed, event(), event(), event()];
    let ids = write(&outbox, &batch).await;
    assert_eq!(metrics.counter("posthaste_enqueue_hot_total"), 2, "each event enters the hot queue separately");
    assert_eq!(metrics.counter("posthaste_enqueue_hot_dropped_total"), 2);
    assert_eq!(metrics.counter("posthaste_enqueue_hot_skipped_delayed_total"), 1);
    gate.open();
    all_done(&outbox, &[&ids[..1], &ids[2..]].concat()).await;
    outbox.close().await;
    assert_eq!(calls.len(), 4);
    assert_eq!(row(&outbox, &ids[1]).await.status, OutboxStatus::New);
}

async fn h16_a_claimed_event_continues_from_its_stored_attempts<H: Harness>(db: H) {
    let ids = write(&writer(&db).await, &events(1)).await;
    let manual = node(&db, Mode::SingleNode).await;
    for _ in 0..2 {
        let claimed = claim(&manual, 1).await;
        settle(&manual, &claimed[0], retry(Duration::ZERO)).await;
    }
    manual.close().await.unwrap();
    let calls = Calls::default();
    let builder = Outbox::new(db.pool().await).listeners(failing(&calls)).retry(at_once(3));
    let outbox = builder.start().await.unwrap();
    let dead = row_when(&outbox, &ids[0], |row| row.status == OutboxStatus::Dead).await;
    outbox.close().await;
    assert_eq!((calls.len(), dead.attempts), (1, 2), "the third attempt was the last one");
}

async fn h17_deliveries_are_measured<H: Harness>(db: H) {
    let metrics = Metrics::default();
    let listening = metrics.listening();
    let retry = RetryPolicy::Fixed { interval: HOUR, max_attempts: Some(2) };
    let outbox = Outbox::new(db.pool().await)
        .retry(retry)
        .on("done", |_| async { tokio::time::sleep(Duration::from_millis(20)).await })
        .on("failing", |_| async { Err::<(), _>(Failure::transient("503", "down")) })
        .on("dead", |_| async { Err::<(), _>(Failure::permanent("410", "gone")) })
        .on("snoozed", |_| async { Outcome::Snoozed { wait: HOUR } })
        .start()
        .await
        .unwrap();
    drop(listening);
    let event = |event_type: &str| Event::text(event_type, "{}");
    let of_the_future = event("done").occurred_at(Utc::now() + TimeDelta::hours(1));
    let events = [event("done"), event("failing"), event("dead"), event("snoozed"), of_the_future];
    write(&outbox, &events.map(|event| event.build().unwrap())).await;
    let duration = "posthaste_dispatch_duration_seconds";
    until("all are settled", async || metrics.samples(duration).len() == 5).await;
    outbox.close().await;
    let count = |name: &str| metrics.counter(&format!("posthaste_dispatch_{name}_total"));
    assert_eq!(["success", "failure", "dead", "deferred"].map(count), [2, 1, 1, 1]);
    assert!(metrics.samples(duration).iter().any(|seconds| *seconds >= 0.02));
    let latency = metrics.samples("posthaste_dispatch_latency_seconds");
    assert_eq!(latency.len(), 1, "only of delivered events, and not where the writer's clock is ahead");
    assert!((0.02..PATIENT).contains(&latency[0]), "{latency:?}");
    for depth in ["hot", "cold"] {
        assert_eq!(metrics.gauge(&format!("posthaste_queue_{depth}_depth")), Some(0.0));
    }
}

/// An upper bound for every measured time, in seconds.
const PATIENT: f64 = 60.0;
