//! A backlog in a SQLite file, beside the plainest statements that drain it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use posthaste::{Mode, Outbox, Pool, TableName};
use sqlx::SqlitePool;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use tokio::sync::Notify;

use posthaste_backend_tests::report::{Aim, Report, Rounds};

const ROWS: u64 = 100_000;
const BATCH: i64 = 500;

pub async fn measure(report: &mut Report) {
    let name = "drain SQLite, single node";
    if report.wants(name) {
        report.saying(name);
        let rounds = Rounds::measure(3, async || drain().await, async || plain_drain().await).await;
        report.ratio(name, rounds, "events/s", Some(Aim::AtLeast(0.7)));
    }
}

/// A file with a backlog, synced to disk as the library does it.
async fn backlog(folder: &tempfile::TempDir) -> SqlitePool {
    let options = SqliteConnectOptions::new().filename(folder.path().join("drain.db")).create_if_missing(true);
    let options = options.journal_mode(SqliteJournalMode::Wal).synchronous(SqliteSynchronous::Full);
    let pool = SqlitePoolOptions::new().max_connections(2).connect_with(options).await.expect("the file opens");
    pool.open(TableName::default(), Mode::SingleNode).await.expect("the table is made");
    let fill = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
         INSERT INTO outbox_event (event_type, payload)
         SELECT 't', '{\"number\":' || i || ',\"text\":\"' || hex(zeroblob(110)) || '\"}' FROM n";
    sqlx::query(fill).bind(ROWS as i64).execute(&pool).await.expect("the table is filled");
    pool
}

/// Reads 500, marks 500, one after the other; events per second.
async fn plain_drain() -> f64 {
    let folder = tempfile::tempdir().expect("a folder");
    let pool = backlog(&folder).await;
    let started = Instant::now();
    loop {
        let read = "SELECT seq, event_id, event_type, payload FROM outbox_event INDEXED BY outbox_event_pending
             WHERE status IN (0, 2) AND due <= CAST(round(unixepoch('subsec') * 1000) AS INTEGER) ORDER BY due, seq LIMIT ?";
        let rows: Vec<(i64, String, String, String)> =
            sqlx::query_as(read).bind(BATCH).fetch_all(&pool).await.expect("rows are read");
        if rows.is_empty() {
            return ROWS as f64 / started.elapsed().as_secs_f64();
        }
        let numbers: Vec<i64> = rows.iter().map(|(seq, ..)| *seq).collect();
        let mark = "UPDATE outbox_event SET status = 1, done_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now')
             WHERE seq IN (SELECT value FROM json_each(?))";
        let numbers = serde_json::json!(numbers).to_string();
        sqlx::query(mark).bind(numbers).execute(&pool).await.expect("rows are marked");
    }
}

/// Through the outbox, until every row is DONE.
async fn drain() -> f64 {
    let folder = tempfile::tempdir().expect("a folder");
    let pool = backlog(&folder).await;
    let counter = Arc::new((AtomicU64::new(0), Notify::new()));
    let counted = counter.clone();
    let started = Instant::now();
    let outbox = Outbox::new(pool).on("t", move |_| {
        if counted.0.fetch_add(1, Ordering::Relaxed) + 1 == ROWS {
            counted.1.notify_one();
        }
        async {}
    });
    let outbox = outbox.start().await.expect("the outbox starts");
    counter.1.notified().await;
    outbox.close().await;
    ROWS as f64 / started.elapsed().as_secs_f64()
}
