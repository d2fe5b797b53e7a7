use std::sync::Arc;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{DeadLetterReplays, DeadLetterStatus, Replay, ReplayResult, ReplayResults};
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::DeadLetterTable;
use crate::sqlite::clock::NOW_MS;
use crate::sqlite::errors::doing;
use crate::sqlite::json::json;

/// Each dead letter that still waits for the replay, and the last result of each other one. It is one statement, so
/// that a dead letter that is settled meanwhile is either pending or has a result.
const RESULTS: &str = "SELECT id, NULL, 1 FROM dlt_event WHERE replay_id = ?1
     UNION ALL
     SELECT letter_id, error_code, 0 FROM retry_history AS answer WHERE replay_id = ?1
         AND id = (SELECT max(id) FROM retry_history WHERE replay_id = ?1 AND letter_id = answer.letter_id)
         AND NOT EXISTS (SELECT 1 FROM dlt_event WHERE id = answer.letter_id AND replay_id = ?1)";

#[async_trait]
impl DeadLetterReplays for DeadLetterTable {
    async fn replay(&self, ids: Vec<String>, reason: Option<String>) -> Result<Replay, StoreError> {
        let request = (uuid::Uuid::now_v7().to_string(), ids, reason);
        let replay = self
            .database
            .write_with("replay dead letters", request, |connection, request| Box::pin(replay(connection, request)));
        replay.await
    }

    async fn replay_results(&self, replay_id: &str) -> Result<ReplayResults, StoreError> {
        doing("read the results of a replay", self.read_results(replay_id)).await
    }
}

impl DeadLetterTable {
    async fn read_results(&self, replay_id: &str) -> Result<ReplayResults, sqlx::Error> {
        let rows = sqlx::query(RESULTS).bind(replay_id).fetch_all(self.database.operators()).await?;
        let mut results = ReplayResults::default();
        for row in &rows {
            if row.try_get(2)? {
                results.pending += 1;
                continue;
            }
            let error_code: Option<String> = row.try_get(1)?;
            let status = if error_code.is_some() { DeadLetterStatus::Failed } else { DeadLetterStatus::Processed };
            results.results.push(ReplayResult { dead_letter_id: row.try_get(0)?, status, error_code });
        }
        Ok(results)
    }
}

async fn replay(
    connection: &mut SqliteConnection,
    request: Arc<(String, Vec<String>, Option<String>)>,
) -> Result<Replay, sqlx::Error> {
    let (id, ids, reason) = &*request;
    let replay = format!(
        "UPDATE dlt_event SET replay_at = {NOW_MS}, replay_id = ?
         WHERE id IN (SELECT value FROM json_each(?)) AND status <> 1 AND replay_at IS NULL"
    );
    let replay = sqlx::query(AssertSqlSafe(replay)).bind(id).bind(json(ids)?);
    let matched = replay.execute(&mut *connection).await?.rows_affected();
    let record = format!("INSERT INTO replay (id, reason, matched, created_at) VALUES (?, ?, ?, {NOW_MS})");
    let record = sqlx::query(AssertSqlSafe(record)).bind(id).bind(reason).bind(matched as i64);
    record.execute(connection).await?;
    Ok(Replay { id: id.clone(), matched })
}
