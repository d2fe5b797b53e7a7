//! The plainest statements that do a job of ours, for the benchmark to compare with. Nothing else uses them.

use posthaste_core::StoreError;
use posthaste_core::outbox::{Mode, TableName};

use super::Database;
use super::outbox::fill;

/// Inserts `count` rows of about 300 bytes, as one statement makes them.
pub async fn fill_outbox(database: &Database, table: &TableName, count: usize) -> Result<(), StoreError> {
    let sql = fill(
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
         INSERT INTO {table} (event_type, payload)
         SELECT 'bench.drained', '{\"number\":' || i || ',\"text\":\"' || hex(zeroblob(110)) || '\"}' FROM n",
        table,
        Mode::SingleNode,
    );
    let count = i64::try_from(count).unwrap_or(i64::MAX);
    database
        .write("fill the outbox", move |connection| {
            let sql = sql.clone();
            Box::pin(
                async move { sqlx::query(sqlx::AssertSqlSafe(sql)).bind(count).execute(connection).await.map(|_| ()) },
            )
        })
        .await
}

/// Reads pending rows in batches and marks each batch as done, one after the other; answers how many there were.
pub async fn drain_outbox(database: &Database, table: &TableName, batch: usize) -> Result<usize, StoreError> {
    let read = fill(
        "SELECT seq, event_id, event_type, payload FROM {table} INDEXED BY {table}_pending
         WHERE status IN (0, 2) AND due <= {now_ms} ORDER BY due, seq LIMIT ?",
        table,
        Mode::SingleNode,
    );
    let mark = fill(
        "UPDATE {table} SET status = 1, done_at = {now} WHERE seq IN (SELECT value FROM json_each(?))",
        table,
        Mode::SingleNode,
    );
    let limit = i64::try_from(batch).unwrap_or(i64::MAX);
    let mut drained = 0;
    loop {
        let rows: Vec<(i64, String, String, String)> = sqlx::query_as(sqlx::AssertSqlSafe(read.as_str()))
            .bind(limit)
            .fetch_all(database.readers())
            .await
            .map_err(|error| super::errors::store_error("read the outbox", error))?;
        if rows.is_empty() {
            return Ok(drained);
        }
        drained += rows.len();
        let done: Vec<String> = rows.iter().map(|(seq, ..)| seq.to_string()).collect();
        let done = format!("[{}]", done.join(","));
        let mark = mark.clone();
        database
            .write("mark the outbox", move |connection| {
                let (mark, done) = (mark.clone(), done.clone());
                Box::pin(async move {
                    sqlx::query(sqlx::AssertSqlSafe(mark)).bind(done).execute(connection).await.map(|_| ())
                })
            })
            .await?;
    }
}
