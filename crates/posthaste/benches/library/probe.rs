//! Plain SQL that does what the library does, and nothing more.

use std::time::Instant;

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, PgPool, Row};

const BATCH: i64 = 500;

const COLUMNS: &str = "event_id, event_type, aggregate_type, aggregate_id, payload, headers, occurred_at, created_at, \
     attempts, available_at, seq";

const ACK: &str =
    "UPDATE outbox_event SET status = 1, done_at = now(), locked_by = NULL, locked_at = NULL WHERE seq = ANY ($1)";

/// Each worker reads 500 rows of its own part, then marks them as DONE, again and again; events per second.
pub async fn ack_only(pool: &PgPool, workers: u64, rows: u64) -> f64 {
    let started = Instant::now();
    let tasks = (0..workers).map(|worker| {
        let pool = pool.clone();
        tokio::spawn(async move {
            let mut connection = pool.acquire().await.expect("a connection");
            prepare(&mut connection).await;
            let select = format!(
                "SELECT {COLUMNS} FROM outbox_event
                 WHERE status IN (0, 2) AND available_at <= now() AND (available_at, seq) > ($1, $2)
                   AND seq % {workers} = {worker} ORDER BY available_at, seq LIMIT {BATCH}"
            );
            let mut after = (DateTime::<Utc>::UNIX_EPOCH, i64::MIN);
            loop {
                let rows = sqlx::query(sqlx::AssertSqlSafe(select.as_str())).bind(after.0).bind(after.1);
                let rows = rows.fetch_all(&mut *connection).await.expect("rows are read");
                let Some(last) = rows.last() else { return };
                after = (last.get("available_at"), last.get("seq"));
                let numbers: Vec<i64> = rows.iter().map(|row| row.get("seq")).collect();
                sqlx::query(ACK).bind(numbers).execute(&mut *connection).await.expect("rows are marked");
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.expect("a worker ends");
    }
    rows as f64 / started.elapsed().as_secs_f64()
}

/// Each worker leases 500 rows, then marks them as DONE, again and again; events per second.
pub async fn lease_and_ack(pool: &PgPool, workers: u64, rows: u64) -> f64 {
    let lease = format!(
        "UPDATE outbox_event SET locked_by = $1, locked_at = now() WHERE seq = ANY (ARRAY(
             SELECT seq FROM outbox_event WHERE status IN (0, 2) AND available_at <= now() AND locked_at IS NULL
             ORDER BY available_at, seq LIMIT {BATCH} FOR UPDATE SKIP LOCKED))
         RETURNING {COLUMNS}"
    );
    let started = Instant::now();
    let tasks = (0..workers).map(|worker| {
        let (pool, lease) = (pool.clone(), lease.clone());
        tokio::spawn(async move {
            let mut connection = pool.acquire().await.expect("a connection");
            prepare(&mut connection).await;
            loop {
                let rows = sqlx::query(sqlx::AssertSqlSafe(lease.as_str())).bind(worker.to_string());
                let rows = rows.fetch_all(&mut *connection).await.expect("rows are leased");
                if rows.is_empty() {
                    return;
                }
                let numbers: Vec<i64> = rows.iter().map(|row| row.get("seq")).collect();
                sqlx::query(ACK).bind(numbers).execute(&mut *connection).await.expect("rows are marked");
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.expect("a worker ends");
    }
    rows as f64 / started.elapsed().as_secs_f64()
}

/// The probe must not be slow because of a bad plan.
async fn prepare(connection: &mut PgConnection) {
    let settings = "SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_sort = off; SET jit = off";
    sqlx::raw_sql(settings).execute(connection).await.expect("settings are made");
}
