//! A backlog that is delivered to listeners that do nothing, all of it marked DONE.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use posthaste::{Mode, Outbox};
use sqlx::PgPool;
use tokio::sync::Notify;

use crate::probe;
use crate::report::{Aim, Report};
use crate::table::{connect, count_done, execute, fill, fill_with, fresh, settle_down};

const ROWS: u64 = 200_000;
const ROUNDS: usize = 3;

pub async fn measure(report: &mut Report, url: &str) {
    let pool = connect(url, 20).await;
    let mut single_node = 0.0;
    if report.wants("drain single node") {
        let (ours, raw) = rounds(report, &pool, url, "drain single node", Mode::SingleNode, 1, nothing).await;
        report.ratio("drain single node", ours, raw, "events/s", Some(Aim::AtLeast(0.7)));
        single_node = ours;
    }
    let mut multi_node = 0.0;
    for nodes in [1, 4] {
        let name = format!("drain multi node, {nodes} sources");
        if report.wants(&name) {
            let (ours, raw) = rounds(report, &pool, url, &name, Mode::MultiNode, nodes, nothing).await;
            report.ratio(&name, ours, raw, "events/s", Some(Aim::AtLeast(0.7)));
            if nodes == 1 {
                multi_node = ours;
            }
        }
    }
    if report.wants("drain ordered, 10k keys, 2 nodes") {
        report.saying("drain ordered");
        let (mut ours, mut unordered) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            ours.push(drain(&pool, url, Mode::ORDERED, 2, 10_000, nothing).await);
            unordered.push(drain(&pool, url, Mode::MultiNode, 2, 10_000, nothing).await);
        }
        let name = "drain ordered, 10k keys, 2 nodes (raw: unordered)";
        report.ratio(name, median(ours), median(unordered), "events/s", Some(Aim::AtLeast(0.5)));
    }
    for (mode, usual, word) in [(Mode::SingleNode, single_node, "single"), (Mode::MultiNode, multi_node, "multi")] {
        for (what, burden) in [("300k delayed", Burden::Delayed), ("an old snapshot", Burden::OldSnapshot)] {
            let name = format!("drain {word} node with {what}");
            if usual > 0.0 && report.wants(&name) {
                report.saying(&name);
                let ours = drain(&pool, url, mode, 1, 0, burden).await;
                report.ratio(&format!("{name} (raw: without)"), ours, usual, "events/s", Some(Aim::AtLeast(0.8)));
            }
        }
        for (what, burden) in [("10M done", Burden::Done), ("10M pending", Burden::Pending)] {
            let name = format!("large: drain {word} node with {what}");
            if report.wants(&name) {
                report.saying(&name);
                let usual = drain(&pool, url, mode, 1, 0, nothing).await;
                let ours = drain(&pool, url, mode, 1, 0, burden).await;
                report.ratio(&format!("{name} (raw: without)"), ours, usual, "events/s", Some(Aim::AtLeast(0.8)));
            }
        }
    }
}

/// What else lies in the table, or is going on.
#[derive(Clone, Copy, PartialEq)]
enum Burden {
    Nothing,
    Delayed,
    OldSnapshot,
    Done,
    /// Rows behind those that are measured.
    Pending,
}

#[allow(non_upper_case_globals)]
const nothing: Burden = Burden::Nothing;

/// Ours and raw in turn, the median of each.
async fn rounds(
    report: &Report,
    pool: &PgPool,
    url: &str,
    name: &str,
    mode: Mode,
    nodes: u64,
    burden: Burden,
) -> (f64, f64) {
    report.saying(name);
    let (mut ours, mut raw) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        fresh(pool, mode).await;
        fill(pool, ROWS, 0).await;
        raw.push(match mode {
            Mode::SingleNode => probe::ack_only(pool, nodes, ROWS).await,
            _ => probe::lease_and_ack(pool, nodes, ROWS).await,
        });
        ours.push(drain(pool, url, mode, nodes, 0, burden).await);
    }
    eprintln!("  ours {ours:.0?}, raw {raw:.0?}");
    (median(ours), median(raw))
}

async fn drain(pool: &PgPool, url: &str, mode: Mode, nodes: u64, keys: u64, burden: Burden) -> f64 {
    fresh(pool, mode).await;
    match burden {
        Burden::Nothing | Burden::OldSnapshot | Burden::Pending => {}
        Burden::Delayed => fill_with(pool, 300_000, 0, Duration::from_secs(3_600)).await,
        Burden::Done => fill_with(pool, 10_000_000, 1, Duration::ZERO).await,
    }
    fill(pool, ROWS, keys).await;
    if burden == Burden::Pending {
        // Due, and behind the others.
        fill_with(pool, 10_000_000, 0, Duration::ZERO).await;
        settle_down(pool).await;
    }
    // Somebody's report that has been running since before the drain: no dead row can be cleaned away.
    let mut snapshot = pool.begin().await.expect("a transaction");
    if burden == Burden::OldSnapshot {
        let look = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox_event_migration";
        sqlx::raw_sql(look).execute(&mut *snapshot).await.expect("a snapshot");
    }
    let counter = Arc::new((AtomicU64::new(0), Notify::new()));
    let started = Instant::now();
    let mut outboxes = Vec::new();
    for _ in 0..nodes {
        let counter = counter.clone();
        let count = move |_| {
            if counter.0.fetch_add(1, Ordering::Relaxed) + 1 == ROWS {
                counter.1.notify_one();
            }
            async {}
        };
        let builder = Outbox::new(connect(url, 5).await).mode(mode);
        let builder = builder.on("t", count.clone()).on_aggregate("a", "t", count);
        outboxes.push(builder.start().await.expect("the outbox starts"));
    }
    counter.1.notified().await;
    // Closing records the last ones: they count.
    for outbox in &outboxes {
        outbox.close().await;
    }
    let took = started.elapsed();
    snapshot.rollback().await.expect("the snapshot ends");
    let done = count_done(pool).await;
    if burden != Burden::Pending {
        assert_eq!((done as u64, counter.0.load(Ordering::Relaxed)), (ROWS, ROWS), "each once, and all DONE");
    }
    if burden == Burden::Done || burden == Burden::Pending {
        execute(pool, "TRUNCATE outbox_event".to_owned()).await;
    }
    ROWS as f64 / took.as_secs_f64()
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}
