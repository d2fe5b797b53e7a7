//! Edge cases of services and databases in which no event may be lost, delivered twice or invented.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthaste::{Event, Failure, Mode, Outbox, OutboxStatus, RetryPolicy, TRACEPARENT, TraceContext};

use crate::harness::{
    Calls, Harness, LEASE, Memory, Postgres, Tamper, all_done, event, event_of, events, on_every_store, outbox,
    row_when, until, write, write_plain, writer,
};

on_every_store! {
    a_transaction_of_one_outbox_carries_the_events_of_another,
    an_event_does_not_overtake_an_undecodable_one_of_its_key,
    any_failure_text_can_be_stored,
    a_standby_takes_over_within_a_second_of_a_clean_stop,
    events_beyond_the_byte_limit_of_the_hot_queue_are_polled,
    the_writers_trace_context_is_stored_with_the_event,
}

/// One transaction writes events of two outboxes in one database.
async fn a_transaction_of_one_outbox_carries_the_events_of_another<H: Harness>(db: H) {
    for mode in [Mode::SingleNode, Mode::MultiNode] {
        let (orders_calls, audit_calls) = (Calls::default(), Calls::default());
        let table = |name: &str| format!("{name}_{}", mode.word());
        let orders = outbox(&db, &orders_calls, |builder| builder.mode(mode).table(table("orders"))).await;
        let audit = outbox(&db, &audit_calls, |builder| builder.mode(mode).table(table("audit"))).await;
        let (order, record) = (event(), event());
        let mut transaction = orders.begin().await.unwrap();
        audit.write(&mut transaction, &record).await.unwrap();
        orders.write(&mut transaction, &order).await.unwrap();
        transaction.commit().await.unwrap();
        audit.committed();
        all_done(&orders, &[order.id().to_owned()]).await;
        all_done(&audit, &[record.id().to_owned()]).await;
        orders.close().await;
        audit.close().await;
        assert_eq!(
            (orders_calls.ids(), audit_calls.ids()),
            (vec![order.id().to_owned()], vec![record.id().to_owned()])
        );
    }
}

async fn an_event_does_not_overtake_an_undecodable_one_of_its_key<H: Harness>(db: H) {
    let calls = Calls::default();
    let events: Vec<Event> = (0..3).map(|_| event_of("1")).collect();
    let ids = write(&writer(&db).await, &events).await;
    db.tamper(Tamper::BreakHeaders { event_id: &ids[1] }).await;
    let outbox = outbox(&db, &calls, |builder| builder.ordered()).await;
    row_when(&outbox, &ids[1], |row| row.status == OutboxStatus::Dead).await;
    row_when(&outbox, &ids[0], |row| row.status == OutboxStatus::Done).await;
    let last = row_when(&outbox, &ids[2], |row| row.locked_by.is_none()).await;
    assert_eq!(last.status, OutboxStatus::New, "the event waits behind the dead one");
    assert!(outbox.dead().discard(&ids[1]).await.unwrap());
    all_done(&outbox, &ids[2..]).await;
    outbox.close().await;
    assert_eq!(calls.ids(), [ids[0].clone(), ids[2].clone()]);
}

async fn any_failure_text_can_be_stored<H: Harness>(db: H) {
    let retry = RetryPolicy::Fixed { interval: Duration::from_millis(1), max_attempts: Some(1) };
    let builder = Outbox::new(db.pool().await).retry(retry).on("t", |event| async move {
        match event.payload().as_bytes() {
            b"bad" => Err(Failure::transient("odd", "a\0b \u{10ffff} \u{1f600} \\ ' \"")),
            _ => Ok(()),
        }
    });
    let outbox = builder.start().await.unwrap();
    let bad = Event::text("t", "bad").build().unwrap();
    let ids = write(&outbox, &[event(), bad, event()]).await;
    let row = row_when(&outbox, &ids[1], |row| row.status == OutboxStatus::Dead).await;
    assert_eq!(row.last_error.as_deref(), Some("odd: a\u{fffd}b \u{10ffff} \u{1f600} \\ ' \""));
    all_done(&outbox, &[ids[0].clone(), ids[2].clone()]).await;
    outbox.close().await;
}

/// With default settings, except for a poll interval that is longer than the test.
async fn a_standby_takes_over_within_a_second_of_a_clean_stop<H: Harness>(db: H) {
    let calls = Calls::default();
    let first = outbox(&db, &calls, |builder| builder).await;
    write(&first, &events(1)).await;
    calls.wait_for(1).await;
    let second = outbox(&db, &calls, |builder| builder).await;
    first.close().await;
    let started = tokio::time::Instant::now();
    let ids = write(&second, &events(1)).await;
    all_done(&second, &ids).await;
    // One second is the promise; the rest is for a machine that is busy with other tests. Without a release, the standby
    // would wait until the lease of the first process ends.
    assert!(started.elapsed() < LEASE / 3, "{:?}", started.elapsed());
    second.close().await;
    assert_eq!(calls.len(), 2);
}

async fn events_beyond_the_byte_limit_of_the_hot_queue_are_polled<H: Harness>(db: H) {
    let calls = Calls::default();
    let outbox = outbox(&db, &calls, |builder| builder).await;
    let heavy: Vec<Event> = (0..80).map(|_| Event::text("t", "x".repeat(1 << 20)).build().unwrap()).collect();
    let mut ids = Vec::new();
    for events in heavy.chunks(4) {
        ids.extend(write(&outbox, events).await);
    }
    all_done(&outbox, &ids).await;
    outbox.close().await;
    assert_eq!(calls.len(), 80);
}

/// PostgreSQL reports no error for such a COMMIT.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_after_a_failed_statement_is_an_error_and_delivers_nothing() {
    let db = Postgres::start().await;
    for mode in [Mode::SingleNode, Mode::MultiNode] {
        let calls = Calls::default();
        let outbox = outbox(&db, &calls, |builder| builder.mode(mode).table(format!("t_{}", mode.word()))).await;
        let gone = event();
        let mut transaction = outbox.begin().await.unwrap();
        outbox.write(&mut transaction, &gone).await.unwrap();
        assert!(sqlx::query("SELECT 1 / 0").execute(&mut *transaction).await.is_err());
        assert!(transaction.commit().await.is_err());
        let kept = event();
        write(&outbox, std::slice::from_ref(&kept)).await;
        all_done(&outbox, &[kept.id().to_owned()]).await;
        until("the event is not in the table", async || outbox.find(gone.id()).await.unwrap().is_none()).await;
        outbox.close().await;
        assert_eq!(calls.ids(), [kept.id().to_owned()]);
    }
}

/// A trace of one span.
struct Trace(Arc<Mutex<Vec<(String, String)>>>);

impl TraceContext for Trace {
    fn current(&self) -> Vec<(String, String)> {
        vec![(TRACEPARENT.to_owned(), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned())]
    }

    fn continue_in(&self, _: &tracing::Span, headers: &[(String, String)]) {
        self.0.lock().unwrap().extend_from_slice(headers);
    }
}

async fn the_writers_trace_context_is_stored_with_the_event<H: Harness>(db: H) {
    let (calls, continued) = (Calls::default(), Arc::new(Mutex::new(Vec::new())));
    let trace = Trace(continued.clone());
    let outbox = outbox(&db, &calls, |builder| builder.trace_context(trace)).await;
    let own = Event::text("t", "{}").header("Traceparent", "its own").build().unwrap();
    let ids = write(&outbox, &[event()]).await;
    all_done(&outbox, &ids).await;
    let given = outbox.find(&ids[0]).await.unwrap().unwrap().event.unwrap();
    assert!(
        given.header(TRACEPARENT).is_some_and(|trace| trace.starts_with("00-0af7")),
        "the trace is stored with the row"
    );
    assert_eq!(*continued.lock().unwrap(), given.headers(), "the listener's span continues the trace");
    let ids = write(&outbox, &[own]).await;
    all_done(&outbox, &ids).await;
    outbox.close().await;
    assert_eq!(calls.events()[1].headers(), [("Traceparent".to_owned(), "its own".to_owned())]);
}

/// With a poll interval that is longer than the test, so that only a notification can wake the reader.
async fn a_writer_in_another_process_wakes_the_reader<H: Harness>(db: H) {
    for mode in [Mode::MultiNode, Mode::ORDERED] {
        let calls = Calls::default();
        let table = format!("elsewhere_{}", mode.word());
        let reader = outbox(&db, &calls, |builder| builder.mode(mode).table(table.clone())).await;
        let writer = Outbox::new(db.pool().await).mode(Mode::WriterOnly).table(table).start().await.unwrap();
        // A notification is lost while the reader does not listen yet. The loop writes until one arrives.
        let started = tokio::time::Instant::now();
        let mut written = 0;
        while calls.len() == 0 {
            assert!(started.elapsed() < Duration::from_secs(30), "no notification came in half a minute");
            write(&writer, &events(1)).await;
            written += 1;
            let _ = tokio::time::timeout(Duration::from_millis(200), calls.wait_for(written)).await;
        }
        calls.wait_for(written).await;
        // A commit of a plain transaction, whose end the outbox does not see, wakes the reader, too.
        let id = write_plain(&db, &writer, &events(1)).await;
        all_done(&reader, &id).await;
        writer.close().await;
        reader.close().await;
        assert_eq!(calls.len(), written + 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_in_another_process_wakes_the_reader_on_postgresql() {
    a_writer_in_another_process_wakes_the_reader(Postgres::start().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_in_another_process_wakes_the_reader_in_memory() {
    a_writer_in_another_process_wakes_the_reader(Memory::start().await).await;
}
