//! J: the four modes, what each refuses, and how an outbox starts and ends.

use std::time::Duration;

use posthaste::{
    DeadHead, Event, Failure, Interceptor, Listeners, Mode, OpenError, Outbox, OutboxStatus, Retention, RetryPolicy,
    Settings, StartError, Unroutable,
};

use crate::harness::{
    Calls, Harness, all_back, all_done, event, event_of, events, on_every_store, outbox, row, row_when, until, watched,
    write,
};

on_every_store! {
    j1_each_mode_delivers_as_it_says,
    j2_a_missing_part_is_named,
    j3_a_process_that_only_writes_refuses_what_it_has_no_use_for,
    j4_a_start_that_fails_leaves_nothing_behind,
    j5_close_ends_everything_even_if_the_database_fails,
    j6_single_node_delivers_by_the_hot_path,
    j6_multi_node_delivers_each_event_once_over_two_nodes,
    j6_ordered_delivers_in_write_order,
    j6_ordered_with_one_attempt_goes_dead_at_the_first_failure,
    j6_writer_only_leaves_the_row_new,
}

async fn j1_each_mode_delivers_as_it_says<H: Harness>(db: H) {
    // Whether a row is born claimed shows in the rows of a dispatcher that cannot deliver.
    for (mode, leases, is_hot) in [
        (Mode::MultiNode, true, true),
        (Mode::ORDERED, true, false),
        (Mode::Ordered(DeadHead::Skip), true, false),
        (Mode::SingleNode, false, true),
    ] {
        assert_eq!((mode.leases_rows(), mode.is_hot()), (leases, is_hot));
        let calls = Calls::default();
        let table = format!("j1_{}_{}", mode.word(), mode.dead_head().map_or("any", DeadHead::word));
        let outbox = outbox(&db, &calls, |builder| builder.mode(mode).table(table)).await;
        let ids = write(&outbox, &events(3)).await;
        all_done(&outbox, &ids).await;
        outbox.close().await;
        assert_eq!(calls.counts(), ids.into_iter().map(|id| (id, 1)).collect(), "{mode:?}");
    }
    let mode = Mode::WriterOnly;
    assert_eq!((mode.leases_rows(), mode.is_hot()), (false, false));
}

async fn j2_a_missing_part_is_named<H: Harness>(db: H) {
    // A pool is a parameter, and a builder is used up by its start: neither can be orphaned or done twice.
    for mode in [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED] {
        let refused = Outbox::new(db.pool().await).mode(mode).start().await.err().unwrap();
        assert!(matches!(refused, StartError::NoListener));
        assert!(refused.to_string().contains("no listener"), "{refused}");
    }
    let calls = Calls::default();
    let started = Outbox::new(db.pool().await).mode(Mode::MultiNode).listeners(calls.listeners()).start().await;
    started.unwrap().close().await;
}

/// Does nothing around a listener.
struct Idle;

#[async_trait::async_trait]
impl Interceptor for Idle {
    async fn before(&self, _: &Event) -> Result<(), Failure> {
        Ok(())
    }

    async fn after(&self, _: &Event, _: Option<&Failure>) {}
}

async fn j3_a_process_that_only_writes_refuses_what_it_has_no_use_for<H: Harness>(db: H) {
    let settings = || Settings { mode: Mode::WriterOnly, ..Settings::default() };
    let second = Duration::from_secs(1);
    for (name, settings) in [
        ("workers", Settings { workers: 1, ..settings() }),
        ("hot_queue", Settings { hot_queue: 1, ..settings() }),
        ("cold_queue", Settings { cold_queue: 1, ..settings() }),
        ("batch_size", Settings { batch_size: 1, ..settings() }),
        ("poll_interval", Settings { poll_interval: Some(second), ..settings() }),
        ("skip_recent", Settings { skip_recent: second, ..settings() }),
        ("lease", Settings { lease: second, ..settings() }),
        ("drain", Settings { drain: second, ..settings() }),
        ("retry", Settings { retry: RetryPolicy::forever(), ..settings() }),
        ("unroutable", Settings { unroutable: Unroutable::Leave { grace: second }, ..settings() }),
    ] {
        let refused = Outbox::new(db.pool().await).settings(settings).start().await.err();
        assert!(matches!(refused, Some(StartError::Setting(bad)) if bad.setting() == name), "{name}");
    }
    let writer = async || Outbox::new(db.pool().await).mode(Mode::WriterOnly);
    let listeners = Listeners::new().on("t", |_| async {}).unwrap();
    for refused in [writer().await.listeners(listeners), writer().await.intercept(Idle)] {
        assert!(matches!(refused.start().await.err(), Some(StartError::ListenersOfAWriter)));
    }
    let accepted = Settings { metrics_prefix: "shop".to_owned(), purge: Some(Retention::default()), ..settings() };
    Outbox::new(db.pool().await).settings(accepted).start().await.unwrap().close().await;
}

async fn j4_a_start_that_fails_leaves_nothing_behind<H: Harness>(db: H) {
    let calls = Calls::default();
    let first = outbox(&db, &calls, |builder| builder.mode(Mode::MultiNode)).await;
    let pool = db.pool().await;
    let refused = Outbox::new(pool.clone()).listeners(calls.listeners()).start().await.err().unwrap();
    assert!(matches!(refused, StartError::Open(OpenError::OtherMode { .. })), "{refused}");
    assert!(refused.to_string().contains("multi_node"), "{refused}");
    all_back::<H>(&pool).await;
    let (pool, book) = watched(&db).await;
    book.refuse("register", 1);
    let refused = Outbox::new(pool).mode(Mode::MultiNode).listeners(calls.listeners()).start().await;
    assert!(matches!(refused.err(), Some(StartError::Open(OpenError::Store(_)))));
    assert!(book.calls("claim").is_empty(), "nothing runs");
    let ids = write(&first, &events(1)).await;
    all_done(&first, &ids).await;
    first.close().await;
}

async fn j5_close_ends_everything_even_if_the_database_fails<H: Harness>(db: H) {
    let (pool, book) = watched(&db).await;
    let (connections, calls) = (pool.pool.clone(), Calls::default());
    let purge = Retention { interval: Duration::from_millis(10), ..Retention::default() };
    let builder = Outbox::new(pool).listeners(calls.listeners()).purge(purge);
    let outbox = builder.poll_interval(Duration::from_millis(10)).start().await.unwrap();
    let ids = write(&outbox, &events(1)).await;
    all_done(&outbox, &ids).await;
    until("it purges", async || !book.calls("purge").is_empty()).await;
    book.refuse("purge", usize::MAX);
    book.refuse("release_ownership", usize::MAX);
    outbox.close().await;
    let after = ["purge", "take", "oldest_due"].map(|statement| book.calls(statement).len());
    assert_eq!(book.calls("release_ownership").len(), 1, "everything is tried");
    outbox.close().await;
    all_back::<H>(&connections).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(["purge", "take", "oldest_due"].map(|statement| book.calls(statement).len()), after, "nothing runs on");
    let late = write(&outbox, &events(1)).await;
    assert_eq!(row(&outbox, &late[0]).await.status, OutboxStatus::New, "written, and somebody else's to deliver");
}

async fn j6_single_node_delivers_by_the_hot_path<H: Harness>(db: H) {
    let calls = Calls::default();
    let outbox = outbox(&db, &calls, |builder| builder.poll_interval(Duration::from_secs(60))).await;
    let ids = write(&outbox, &events(10)).await;
    all_done(&outbox, &ids).await;
    outbox.close().await;
    assert_eq!(calls.counts(), ids.into_iter().map(|id| (id, 1)).collect());
}

async fn j6_multi_node_delivers_each_event_once_over_two_nodes<H: Harness>(db: H) {
    let calls = Calls::default();
    let first = outbox(&db, &calls, |builder| builder.mode(Mode::MultiNode)).await;
    let second = outbox(&db, &calls, |builder| builder.mode(Mode::MultiNode)).await;
    let mut ids = Vec::new();
    for number in 0..10 {
        let node = if number % 2 == 0 { &first } else { &second };
        ids.extend(write(node, &[event()]).await);
    }
    for id in &ids {
        row_when(&first, id, |row| row.status == OutboxStatus::Done).await;
    }
    first.close().await;
    second.close().await;
    assert_eq!(calls.counts(), ids.into_iter().map(|id| (id, 1)).collect());
}

async fn j6_ordered_delivers_in_write_order<H: Harness>(db: H) {
    let calls = Calls::default();
    let outbox = outbox(&db, &calls, |builder| builder.ordered()).await;
    let events: Vec<Event> = (0..10).map(|_| event_of("1")).collect();
    let ids = write(&outbox, &events).await;
    for id in &ids {
        row_when(&outbox, id, |row| row.status == OutboxStatus::Done).await;
    }
    outbox.close().await;
    assert_eq!(calls.ids(), ids);
}

async fn j6_ordered_with_one_attempt_goes_dead_at_the_first_failure<H: Harness>(db: H) {
    let calls = Calls::default();
    let seen = calls.clone();
    let retry = RetryPolicy::Fixed { interval: Duration::ZERO, max_attempts: Some(1) };
    let builder = Outbox::new(db.pool().await).mode(Mode::Ordered(DeadHead::Skip)).retry(retry);
    let builder = builder.on_aggregate("a", "t", move |event| {
        let is_first = seen.len() == 0;
        seen.add(event);
        async move { if is_first { Err(Failure::transient("503", "down")) } else { Ok(()) } }
    });
    let outbox = builder.start().await.unwrap();
    let events = [event_of("1"), event_of("1")];
    let ids = write(&outbox, &events).await;
    let dead = row_when(&outbox, &ids[0], |row| row.status == OutboxStatus::Dead).await;
    assert_eq!((dead.last_error.as_deref(), dead.attempts), (Some("503: down"), 0));
    row_when(&outbox, &ids[1], |row| row.status == OutboxStatus::Done).await;
    outbox.close().await;
    assert_eq!(calls.ids(), ids);
}

async fn j6_writer_only_leaves_the_row_new<H: Harness>(db: H) {
    let outbox = Outbox::new(db.pool().await).mode(Mode::WriterOnly).start().await.unwrap();
    let ids = write(&outbox, &[event()]).await;
    outbox.close().await;
    let row = outbox.find(&ids[0]).await.unwrap().unwrap();
    assert_eq!((row.status, row.attempts, row.locked_by), (OutboxStatus::New, 0, None));
}
