//! The outbox table of a measurement.

use std::time::Duration;

use posthaste::postgres::OutboxStore;
use posthaste::{Mode, Pool, TableName};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, PgPool};

/// With this payload, a row takes about 300 bytes.
pub const PAYLOAD: usize = 150;

/// A pool as a service has it.
pub async fn connect(url: &str, connections: u32) -> PgPool {
    let pool = PgPoolOptions::new().max_connections(connections).test_before_acquire(false);
    pool.connect(url).await.expect("the server answers")
}

/// An empty table for this mode, whatever was there before.
pub async fn fresh(pool: &PgPool, mode: Mode) -> OutboxStore {
    execute(
        pool,
        "DROP TABLE IF EXISTS outbox_event, outbox_event_owner, outbox_event_migration, outbox_event_ordered"
            .to_owned(),
    )
    .await;
    pool.open(TableName::default(), mode).await.expect("the table is made")
}

/// Fills the table with rows that are due now, of this many aggregates (0: none).
pub async fn fill(pool: &PgPool, rows: u64, keys: u64) {
    let key = if keys == 0 { "NULL".to_owned() } else { format!("n % {keys}") };
    execute(
        pool,
        format!(
            "INSERT INTO outbox_event (event_id, event_type, payload, aggregate_type, aggregate_id, available_at)
             SELECT 'e' || n, 't', '\"' || repeat('x', {PAYLOAD}) || '\"', CASE WHEN {key} IS NULL THEN '__GLOBAL__' ELSE 'a' END,
                 {key}, now() FROM generate_series(1, {rows}) AS n"
        ),
    )
    .await;
    settle_down(pool).await;
}

/// Adds rows that are not part of the measurement.
pub async fn fill_with(pool: &PgPool, rows: u64, status: u8, due: Duration) {
    execute(
        pool,
        format!(
            "INSERT INTO outbox_event (event_id, event_type, payload, status, available_at)
             SELECT 'x{status}-' || n, 't', '\"' || repeat('x', {PAYLOAD}) || '\"', {status}, now() + interval '{} seconds'
             FROM generate_series(1, {rows}) AS n",
            due.as_secs()
        ),
    )
    .await;
}

/// Does the work that filling has left to the server, so that it does not run during a measurement.
pub async fn settle_down(pool: &PgPool) {
    execute(pool, "VACUUM (ANALYZE) outbox_event".to_owned()).await;
    execute(pool, "CHECKPOINT".to_owned()).await;
}

pub async fn execute(pool: &PgPool, sql: String) {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await.expect("the statement runs");
}

pub async fn count_done(pool: &PgPool) -> i64 {
    let count = "SELECT count(*) FROM outbox_event WHERE status = 1 AND event_id LIKE 'e%'";
    sqlx::query_scalar(count).fetch_one(pool).await.expect("the rows are counted")
}
