//! The latency from a commit to its listener, and what the outbox adds to the cost of a transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use posthaste::{Event, Mode, Outbox};
use sqlx::PgPool;
use tokio::sync::{Notify, mpsc};

use crate::table::{PAYLOAD, connect, fresh, settle_down};
use posthaste_backend_tests::report::{Aim, Report, Rounds};

const WRITERS: u64 = 16;

pub async fn measure(report: &mut Report, url: &str) {
    let pool = connect(url, 24).await;
    if report.wants("hot latency") {
        report.saying("hot latency at 1,000 events/s");
        let mut latencies = latencies(&pool).await;
        latencies.sort_unstable();
        let at = |share: f64| latencies[(latencies.len() as f64 * share) as usize].as_nanos() as f64 / 1_000.0;
        report.figure("hot latency, commit to listener, p50", at(0.5), "µs", Some(Aim::AtMost(30.0)));
        report.figure("hot latency, commit to listener, p99", at(0.99), "µs", Some(Aim::AtMost(500.0)));
    }
    if report.wants("write cost") {
        report.saying("write cost");
        let rounds = write_cost(&pool).await;
        report.ratio("write cost, one transaction with one event", rounds, "µs", Some(Aim::AtMost(1.3)));
    }
    for mode in [Mode::SingleNode, Mode::MultiNode] {
        let name = format!("hot end to end, 16 writers, {}", mode.word());
        if report.wants(&name) {
            report.saying(&name);
            let ours = async || hot_end_to_end(&pool, mode).await;
            let rounds = Rounds::measure(5, ours, async || insert_only(&pool).await).await;
            report.ratio(&name, rounds, "events/s", Some(Aim::AtLeast(0.9)));
        }
    }
}

fn payload() -> String {
    format!("\"{}\"", "x".repeat(PAYLOAD))
}

/// Writes one event at a time, a thousand a second.
async fn latencies(pool: &PgPool) -> Vec<Duration> {
    const EVENTS: usize = 5_000;
    fresh(pool, Mode::SingleNode).await;
    let (sender, mut listened) = mpsc::unbounded_channel();
    let outbox = Outbox::new(pool.clone()).on("t", move |_| {
        let _ = sender.send(Instant::now());
        async {}
    });
    let outbox = outbox.start().await.expect("the outbox starts");
    let mut ticks = tokio::time::interval(Duration::from_millis(1));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut latencies = Vec::with_capacity(EVENTS);
    for _ in 0..EVENTS {
        ticks.tick().await;
        let mut transaction = outbox.begin().await.expect("a transaction");
        outbox.write(&mut transaction, Event::text("t", payload())).await.expect("a write");
        transaction.commit().await.expect("a commit");
        // The server has confirmed the commit when this call returns: only the time after that is measured.
        let committed = Instant::now();
        let called = listened.recv().await.expect("a call");
        latencies.push(called.saturating_duration_since(committed));
    }
    outbox.close().await;
    latencies
}

/// Microseconds for one transaction with one event: through the outbox, and by a plain INSERT of the same row.
async fn write_cost(pool: &PgPool) -> Rounds {
    fresh(pool, Mode::WriterOnly).await;
    let outbox = Outbox::new(pool.clone()).mode(Mode::WriterOnly).start().await.expect("the outbox starts");
    let ours = async || {
        time_each(async || {
            let mut transaction = outbox.begin().await.expect("a transaction");
            outbox.write(&mut transaction, Event::text("t", payload())).await.expect("a write");
            transaction.commit().await.expect("a commit");
        })
        .await
    };
    let rounds = Rounds::measure(5, ours, async || time_each(async || plain_insert(pool).await).await).await;
    outbox.close().await;
    rounds
}

/// Microseconds for one call, the mean of many in a row.
async fn time_each(one: impl AsyncFn()) -> f64 {
    const TIMES: u32 = 500;
    let started = Instant::now();
    for _ in 0..TIMES {
        one().await;
    }
    started.elapsed().as_secs_f64() * 1e6 / f64::from(TIMES)
}

async fn plain_insert(pool: &PgPool) {
    let event = Event::text("t", payload()).build().expect("an event");
    let mut transaction = pool.begin().await.expect("a transaction");
    let insert = "INSERT INTO outbox_event (event_id, event_type, payload, occurred_at) VALUES ($1, $2, $3, $4)";
    let insert = sqlx::query(insert).bind(event.id()).bind("t").bind(payload()).bind(event.occurred_at());
    insert.execute(&mut *transaction).await.expect("an insert");
    transaction.commit().await.expect("a commit");
}

const HOT_EVENTS: u64 = 20_000;

/// Sixteen writers, one event in each transaction, and no reader; events per second.
async fn insert_only(pool: &PgPool) -> f64 {
    fresh(pool, Mode::WriterOnly).await;
    settle_down(pool).await;
    let started = Instant::now();
    let writers = (0..WRITERS).map(|_| {
        let pool = pool.clone();
        tokio::spawn(async move {
            for _ in 0..HOT_EVENTS / WRITERS {
                plain_insert(&pool).await;
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.expect("a writer ends");
    }
    HOT_EVENTS as f64 / started.elapsed().as_secs_f64()
}

/// The same through the outbox with its default settings, until every row is DONE.
async fn hot_end_to_end(pool: &PgPool, mode: Mode) -> f64 {
    fresh(pool, mode).await;
    settle_down(pool).await;
    let counter = Arc::new((AtomicU64::new(0), Notify::new()));
    let counted = counter.clone();
    let outbox = Outbox::new(pool.clone()).mode(mode).on("t", move |_| {
        if counted.0.fetch_add(1, Ordering::Relaxed) + 1 == HOT_EVENTS {
            counted.1.notify_one();
        }
        async {}
    });
    let outbox = outbox.start().await.expect("the outbox starts");
    let started = Instant::now();
    let writers = (0..WRITERS).map(|_| {
        let outbox = outbox.clone();
        tokio::spawn(async move {
            for _ in 0..HOT_EVENTS / WRITERS {
                let mut transaction = outbox.begin().await.expect("a transaction");
                outbox.write(&mut transaction, Event::text("t", payload())).await.expect("a write");
                transaction.commit().await.expect("a commit");
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.expect("a writer ends");
    }
    counter.1.notified().await;
    outbox.close().await;
    let took = started.elapsed();
    let done: i64 = sqlx::query_scalar("SELECT count(*) FROM outbox_event WHERE status = 1")
        .fetch_one(pool)
        .await
        .expect("the rows are counted");
    assert_eq!((done as u64, counter.0.load(Ordering::Relaxed)), (HOT_EVENTS, HOT_EVENTS), "each once, and all DONE");
    HOT_EVENTS as f64 / took.as_secs_f64()
}
