//! G: how the table is polled.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use posthaste::{
    Delay, Event, EventBuilder, Listeners, Mode, Outbox, OutboxBuilder, OutboxStatus, Settings, StartError,
};
use posthaste_core::outbox::Store;

use crate::harness::{
    CallLog, Calls, Gate, HOUR, Harness, Metrics, Tamper, Watched, WatchedPool, all_done, events, on_every_store,
    outbox, row, row_when, until, watched, write, writer,
};

on_every_store! {
    g1_the_table_is_polled_until_close,
    g2_a_full_queue_stops_polling,
    g3_a_claim_is_limited_by_batch_size_and_free_queue_space,
    g4_rows_beyond_the_queue_limit_stay_unclaimed,
    g5_rows_younger_than_skip_recent_are_not_claimed,
    g6_an_undecodable_row_goes_dead_and_the_others_are_delivered,
    g7_headers_are_read_as_they_were_written,
    g8_a_polled_event_keeps_its_times,
    g10_every_claim_has_its_own_claim_id,
    g10_an_error_after_a_claim_does_not_lose_its_rows,
    g11_the_lag_is_the_age_of_the_oldest_due_event,
    g12_polling_continues_after_a_failed_claim,
}

const SOON: Duration = Duration::from_millis(20);

type Builder<H> = OutboxBuilder<WatchedPool<<H as Harness>::Pool>, Watched<<H as Harness>::Store>>;

/// A dispatcher that polls often, on a store that logs its calls.
async fn polling<H: Harness>(db: &H, listeners: Listeners) -> (Builder<H>, CallLog) {
    let (pool, call_log) = watched(db).await;
    (Outbox::new(pool).listeners(listeners).poll_interval(SOON), call_log)
}

/// Sleeps for several poll intervals, to show that something does not happen.
async fn some_polls() {
    tokio::time::sleep(SOON * 6).await;
}

async fn locked<S: Store>(outbox: &Outbox<S>, ids: &[String]) -> Vec<bool> {
    let mut locked = Vec::new();
    for id in ids {
        locked.push(row(outbox, id).await.locked_by.is_some());
    }
    locked
}

async fn g1_the_table_is_polled_until_close<H: Harness>(db: H) {
    let calls = Calls::default();
    let (builder, call_log) = polling(&db, calls.listeners()).await;
    let dispatcher = builder.start().await.unwrap();
    until("the table is polled repeatedly", async || call_log.calls("claim").len() >= 5).await;
    dispatcher.close().await;
    dispatcher.close().await;
    let asked = call_log.calls("claim").len();
    let ids = write(&dispatcher, &events(1)).await;
    dispatcher.committed();
    some_polls().await;
    assert_eq!((call_log.calls("claim").len(), calls.len()), (asked, 0), "no poll after close");
    assert_eq!(row(&dispatcher, &ids[0]).await.status, OutboxStatus::New);
    // committed() triggers a poll long before the next interval ends.
    let (builder, call_log) = polling(&db, calls.listeners()).await;
    let dispatcher = builder.poll_interval(HOUR).start().await.unwrap();
    all_done(&dispatcher, &ids).await;
    let asked = call_log.calls("claim").len();
    dispatcher.committed();
    until("committed() polls at once", async || call_log.calls("claim").len() > asked).await;
    dispatcher.close().await;
}

async fn g2_a_full_queue_stops_polling<H: Harness>(db: H) {
    let (calls, gate) = (Calls::default(), Gate::closed());
    let ids = write(&writer(&db).await, &events(3)).await;
    let (builder, call_log) = polling(&db, calls.gated_listeners(&gate)).await;
    let settings = Settings { workers: 1, cold_queue: 1, poll_interval: Some(SOON), ..Settings::default() };
    let outbox = builder.settings(settings).start().await.unwrap();
    calls.wait_for(1).await;
    let asked = call_log.calls("claim").len();
    some_polls().await;
    outbox.committed();
    some_polls().await;
    assert_eq!((call_log.calls("claim").len(), calls.len()), (asked, 1));
    gate.open();
    all_done(&outbox, &ids).await;
    outbox.close().await;
    assert_eq!(calls.ids(), ids);
}

async fn g3_a_claim_is_limited_by_batch_size_and_free_queue_space<H: Harness>(db: H) {
    for (batch_size, cold_queue, asked) in [(500, 2, 2), (3, 1_000, 3)] {
        let (calls, gate) = (Calls::default(), Gate::closed());
        let table = format!("g3_{batch_size}");
        let builder = Outbox::new(db.pool().await).mode(Mode::WriterOnly).table(&table);
        let ids = write(&builder.start().await.unwrap(), &events(3)).await;
        let (builder, call_log) = polling(&db, calls.gated_listeners(&gate)).await;
        let settings = Settings { batch_size, cold_queue, mode: Mode::MultiNode, ..Settings::default() };
        let outbox = builder.settings(settings).table(&table).start().await.unwrap();
        calls.wait_for(asked.min(3)).await;
        assert_eq!(call_log.calls("claim")[0], asked);
        if asked == 2 {
            assert_eq!(locked(&outbox, &ids).await, [true, true, false]);
        }
        gate.open();
        all_done(&outbox, &ids).await;
        outbox.close().await;
        assert_eq!(calls.len(), 3);
    }
}

async fn g4_rows_beyond_the_queue_limit_stay_unclaimed<H: Harness>(db: H) {
    let (calls, gate) = (Calls::default(), Gate::closed());
    let ids = write(&writer(&db).await, &events(5)).await;
    let (builder, _) = polling(&db, calls.gated_listeners(&gate)).await;
    let settings =
        Settings { workers: 2, cold_queue: 2, mode: Mode::MultiNode, poll_interval: Some(SOON), ..Settings::default() };
    let outbox = builder.settings(settings).start().await.unwrap();
    calls.wait_for(2).await;
    some_polls().await;
    assert_eq!(locked(&outbox, &ids).await, [true, true, false, false, false]);
    gate.open();
    all_done(&outbox, &ids).await;
    outbox.close().await;
    assert_eq!(calls.counts(), ids.into_iter().map(|id| (id, 1)).collect());
}

async fn g5_rows_younger_than_skip_recent_are_not_claimed<H: Harness>(db: H) {
    let (calls, metrics) = (Calls::default(), Metrics::default());
    let ids = write(&writer(&db).await, &events(1)).await;
    let (builder, call_log) = polling(&db, calls.listeners()).await;
    let settings = Settings { skip_recent: HOUR, poll_interval: Some(SOON), ..Settings::default() };
    let listening = metrics.listening();
    let outbox = builder.settings(settings).start().await.unwrap();
    drop(listening);
    until("the table was polled", async || call_log.calls("claim").len() >= 3).await;
    assert_eq!(row(&outbox, &ids[0]).await.status, OutboxStatus::New);
    assert_eq!((metrics.counter("posthaste_enqueue_cold_total"), calls.len()), (0, 0));
    db.tamper(Tamper::Age { event_id: &ids[0], by: HOUR }).await;
    all_done(&outbox, &ids).await;
    outbox.close().await;
    assert_eq!(metrics.counter("posthaste_enqueue_cold_total"), 1);
}

async fn g6_an_undecodable_row_goes_dead_and_the_others_are_delivered<H: Harness>(db: H) {
    drop(db);
    for mode in [Mode::SingleNode, Mode::MultiNode] {
        let db = H::start().await;
        let calls = Calls::default();
        let ids = write(&writer(&db).await, &events(3)).await;
        db.tamper(Tamper::BreakHeaders { event_id: &ids[1] }).await;
        let outbox = outbox(&db, &calls, |builder| builder.mode(mode)).await;
        all_done(&outbox, &[ids[0].clone(), ids[2].clone()]).await;
        let broken = row_when(&outbox, &ids[1], |row| row.status == OutboxStatus::Dead).await;
        assert!(broken.event.is_none() && broken.done_at.is_some());
        let error = broken.last_error.unwrap();
        assert!(error.starts_with("undecodable: headers"), "{error}");
        outbox.close().await;
        assert_eq!(calls.len(), 2);
    }
}

async fn g7_headers_are_read_as_they_were_written<H: Harness>(db: H) {
    let calls = Calls::default();
    let event = Event::text("t", "{}").header("Trace-Id", "é \"1\"\n").header("b", "\\").build().unwrap();
    write(&writer(&db).await, std::slice::from_ref(&event)).await;
    let outbox = outbox(&db, &calls, |builder| builder).await;
    calls.wait_for(1).await;
    outbox.close().await;
    let delivered = &calls.events()[0];
    assert_eq!(delivered.headers(), event.headers());
    assert_eq!(delivered.header("trace-id"), Some("é \"1\"\n"), "header names ignore case");
}

/// Writes an event that is not due yet, and returns its id and its due time. An event that the machine delayed until it
/// was due is not a delayed event; the next one is written then.
async fn write_before_due<S: Store>(writer: &Outbox<S>, event: EventBuilder) -> (String, DateTime<Utc>) {
    for _ in 0..20 {
        let available_at = DateTime::from_timestamp_millis(Utc::now().timestamp_millis()).unwrap();
        let available_at = available_at + TimeDelta::milliseconds(300);
        let ids = write(writer, &[event.clone().available_at(available_at).build().unwrap()]).await;
        if row(writer, &ids[0]).await.created_at < available_at {
            return (ids[0].clone(), available_at);
        }
    }
    panic!("every event was due when it was written")
}

async fn g8_a_polled_event_keeps_its_times<H: Harness>(db: H) {
    drop(db);
    for mode in [Mode::SingleNode, Mode::MultiNode] {
        let db = H::start().await;
        let calls = Calls::default();
        let occurred_at: DateTime<Utc> = "2020-02-29T01:02:03.000004Z".parse().unwrap();
        let event = Event::text("t", "{}").occurred_at(occurred_at);
        let writer = writer(&db).await;
        let now = write(&writer, &[event.clone().build().unwrap()]).await;
        let (later, available_at) = write_before_due(&writer, event).await;
        let outbox = outbox(&db, &calls, |builder| builder.mode(mode)).await;
        all_done(&outbox, &[now[0].clone(), later.clone()]).await;
        outbox.close().await;
        let delivered = |id: &str| calls.events().into_iter().find(|event| event.id() == id).unwrap();
        let (now, later) = (delivered(&now[0]), delivered(&later));
        assert_eq!((now.occurred_at(), now.delay()), (occurred_at, Delay::None));
        assert_eq!((later.occurred_at(), later.delay()), (occurred_at, Delay::Until(available_at)));
        assert!(Utc::now() >= available_at);
    }
}

#[tokio::test]
async fn g9_invalid_settings_are_refused() {
    for (name, settings) in [
        ("batch_size", Settings { batch_size: 0, ..Settings::default() }),
        ("poll_interval", Settings { poll_interval: Some(Duration::ZERO), ..Settings::default() }),
        ("lease", Settings { lease: Duration::ZERO, ..Settings::default() }),
        ("lease", Settings { lease: Duration::from_millis(999), ..Settings::default() }),
    ] {
        let database = posthaste_testing::MemoryDatabase::new();
        let refused = Outbox::new(database).settings(settings).on("t", |_| async {}).start().await;
        assert!(matches!(refused.err(), Some(StartError::Setting(bad)) if bad.setting() == name));
    }
}

async fn g10_every_claim_has_its_own_claim_id<H: Harness>(db: H) {
    let (calls, gate) = (Calls::default(), Gate::closed());
    let mut owners = Vec::new();
    let mut nodes = Vec::new();
    for at in 0..2 {
        let ids = write(&writer(&db).await, &events(1)).await;
        let (builder, _) = polling(&db, calls.gated_listeners(&gate)).await;
        let outbox = builder.mode(Mode::MultiNode).start().await.unwrap();
        calls.wait_for(at + 1).await;
        owners.push(row(&outbox, &ids[0]).await.locked_by.unwrap());
        nodes.push(outbox);
    }
    assert_ne!(owners[0], owners[1]);
    assert!(owners.iter().all(|owner| owner.len() >= 16), "{owners:?}");
    gate.open();
    for node in nodes {
        node.close().await;
    }
    assert_eq!(calls.len(), 2);
}

async fn g10_an_error_after_a_claim_does_not_lose_its_rows<H: Harness>(db: H) {
    let calls = Calls::default();
    let ids = write(&writer(&db).await, &events(3)).await;
    let (builder, call_log) = polling(&db, calls.listeners()).await;
    call_log.refuse("next_due", 1);
    let outbox = builder.mode(Mode::MultiNode).start().await.unwrap();
    all_done(&outbox, &ids).await;
    outbox.close().await;
    assert_eq!((calls.len(), call_log.refusals("next_due")), (3, 0));
}

async fn g11_the_lag_is_the_age_of_the_oldest_due_event<H: Harness>(db: H) {
    let (calls, gate, metrics) = (Calls::default(), Gate::closed(), Metrics::default());
    let (builder, call_log) = polling(&db, calls.gated_listeners(&gate)).await;
    let listening = metrics.listening();
    let outbox = builder.start().await.unwrap();
    drop(listening);
    let lag = || metrics.gauge("posthaste_lag_oldest_ms").unwrap();
    until("the lag is measured", async || call_log.calls("oldest_due").len() > 1).await;
    assert_eq!(lag(), 0.0, "no event is due");
    let delayed = Event::text("t", "{}").deliver_after(HOUR).build().unwrap();
    let ids = write(&outbox, &[delayed, crate::harness::event()]).await;
    until("the lag grows", async || lag() > 100.0).await;
    call_log.refuse("oldest_due", usize::MAX);
    let refused = call_log.calls("oldest_due").len();
    until("the query was refused", async || call_log.calls("oldest_due").len() > refused + 1).await;
    let known = lag();
    some_polls().await;
    assert!(known > 0.0 && lag() == known, "the last known lag stays");
    call_log.refuse("oldest_due", 0);
    gate.open();
    all_done(&outbox, &ids[1..]).await;
    until("nothing is due", async || lag() == 0.0).await;
    outbox.close().await;
}

async fn g12_polling_continues_after_a_failed_claim<H: Harness>(db: H) {
    let calls = Calls::default();
    let ids = write(&writer(&db).await, &events(1)).await;
    let (builder, call_log) = polling(&db, calls.listeners()).await;
    call_log.refuse("claim", 3);
    let outbox = builder.start().await.unwrap();
    all_done(&outbox, &ids).await;
    outbox.close().await;
    assert_eq!((calls.ids(), call_log.refusals("claim")), (ids, 0));
}
