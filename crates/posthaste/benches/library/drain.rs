//! Drains a backlog to listeners that do nothing, until every row is DONE.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use posthaste::{Mode, Outbox};
use sqlx::PgPool;
use tokio::sync::Notify;

use crate::probe;
use crate::table::{connect, count_done, execute, fill, fill_with, fresh, settle_down};
use posthaste_backend_tests::report::{Aim, Report, Rounds};

const ROWS: u64 = 200_000;

/// The events to deliver, and the number of their aggregates (0: none).
#[derive(Clone, Copy)]
struct Backlog {
    rows: u64,
    keys: u64,
}

const UNORDERED: Backlog = Backlog { rows: ROWS, keys: 0 };
const MANY_KEYS: Backlog = Backlog { rows: ROWS, keys: 10_000 };

pub async fn measure(report: &mut Report, url: &str) {
    let pool = connect(url, 20).await;
    for (name, mode, nodes) in [
        ("drain single node", Mode::SingleNode, 1),
        ("drain multi node, 1 source", Mode::MultiNode, 1),
        ("drain multi node, 4 sources", Mode::MultiNode, 4),
    ] {
        if report.wants(name) {
            report.saying(name);
            let ours = async || drain(&pool, url, mode, nodes, UNORDERED, nothing).await;
            let rounds = Rounds::measure(5, ours, async || probe(&pool, mode, nodes).await).await;
            report.ratio(name, rounds, "events/s", Some(Aim::AtLeast(0.7)));
        }
    }
    let name = "drain ordered, 10k keys, 2 nodes (raw: unordered)";
    if report.wants(name) {
        report.saying(name);
        let ours = async || drain(&pool, url, Mode::ORDERED, 2, MANY_KEYS, nothing).await;
        let unordered = async || drain(&pool, url, Mode::MultiNode, 2, MANY_KEYS, nothing).await;
        let rounds = Rounds::measure(3, ours, unordered).await;
        report.ratio(name, rounds, "events/s", Some(Aim::AtLeast(0.5)));
    }
    // Each aggregate has many events, so most of the backlog waits for events that are in flight.
    let name = "drain ordered, 100 keys, 20k events (raw: unordered)";
    if report.wants(name) {
        report.saying(name);
        let backlog = Backlog { rows: 20_000, keys: 100 };
        let ours = async || drain(&pool, url, Mode::ORDERED, 1, backlog, nothing).await;
        let unordered = async || drain(&pool, url, Mode::MultiNode, 1, backlog, nothing).await;
        let rounds = Rounds::measure(5, ours, unordered).await;
        report.ratio(name, rounds, "events/s", Some(Aim::AtLeast(0.3)));
    }
    for (mode, word) in [(Mode::SingleNode, "single"), (Mode::MultiNode, "multi")] {
        for (name, burden, rounds) in [
            (format!("drain {word} node with 300k delayed"), Burden::Delayed, 3),
            (format!("drain {word} node with an old snapshot"), Burden::OldSnapshot, 3),
            (format!("large: drain {word} node with 10M done"), Burden::Done, 1),
            (format!("large: drain {word} node with 10M pending"), Burden::Pending, 1),
        ] {
            if report.wants(&name) {
                report.saying(&name);
                let ours = async || drain(&pool, url, mode, 1, UNORDERED, burden).await;
                let usual = async || drain(&pool, url, mode, 1, UNORDERED, nothing).await;
                let rounds = Rounds::measure(rounds, ours, usual).await;
                report.ratio(&format!("{name} (raw: without)"), rounds, "events/s", Some(Aim::AtLeast(0.8)));
            }
        }
    }
}

/// What makes a drain harder: other rows in the table, or another transaction.
#[derive(Clone, Copy, PartialEq)]
enum Burden {
    Nothing,
    Delayed,
    OldSnapshot,
    Done,
    /// Pending rows after those that are measured.
    Pending,
}

#[allow(non_upper_case_globals)]
const nothing: Burden = Burden::Nothing;

/// The same drain in plain SQL.
async fn probe(pool: &PgPool, mode: Mode, workers: u64) -> f64 {
    fresh(pool, mode).await;
    fill(pool, ROWS, 0).await;
    match mode {
        Mode::SingleNode => probe::ack_only(pool, workers, ROWS).await,
        _ => probe::lease_and_ack(pool, workers, ROWS).await,
    }
}

async fn drain(pool: &PgPool, url: &str, mode: Mode, nodes: u64, backlog: Backlog, burden: Burden) -> f64 {
    let Backlog { rows, keys } = backlog;
    fresh(pool, mode).await;
    match burden {
        Burden::Nothing | Burden::OldSnapshot | Burden::Pending => {}
        Burden::Delayed => fill_with(pool, 300_000, 0, Duration::from_secs(3_600)).await,
        Burden::Done => fill_with(pool, 10_000_000, 1, Duration::ZERO).await,
    }
    fill(pool, rows, keys).await;
    if burden == Burden::Pending {
        // Due, and after the others.
        fill_with(pool, 10_000_000, 0, Duration::ZERO).await;
        settle_down(pool).await;
    }
    // A report that has been running since before the drain: vacuum can remove no dead row version.
    let mut snapshot = pool.begin().await.expect("a transaction");
    if burden == Burden::OldSnapshot {
        let look = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox_event_migration";
        sqlx::raw_sql(look).execute(&mut *snapshot).await.expect("a snapshot");
    }
    let counter = Arc::new((AtomicU64::new(0), Notify::new()));
    let mut pools = Vec::new();
    for _ in 0..nodes {
        pools.push(connect(url, 5).await);
    }
    let started = Instant::now();
    let mut outboxes = Vec::new();
    for pool in pools {
        let counter = counter.clone();
        let count = move |_| {
            if counter.0.fetch_add(1, Ordering::Relaxed) + 1 == rows {
                counter.1.notify_one();
            }
            async {}
        };
        let builder = Outbox::new(pool).mode(mode);
        let builder = builder.on("t", count.clone()).on_aggregate("a", "t", count);
        outboxes.push(builder.start().await.expect("the outbox starts"));
    }
    counter.1.notified().await;
    // Closing settles the last events, so its time counts.
    for outbox in &outboxes {
        outbox.close().await;
    }
    let took = started.elapsed();
    snapshot.rollback().await.expect("the snapshot ends");
    let done = count_done(pool).await;
    if burden != Burden::Pending {
        assert_eq!((done as u64, counter.0.load(Ordering::Relaxed)), (rows, rows), "each once, and all DONE");
    }
    if burden == Burden::Done || burden == Burden::Pending {
        execute(pool, "TRUNCATE outbox_event".to_owned()).await;
    }
    rows as f64 / took.as_secs_f64()
}
