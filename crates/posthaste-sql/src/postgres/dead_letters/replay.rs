use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{DeadLetterReplays, DeadLetterStatus, Replay, ReplayResult, ReplayResults};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row};
use uuid::Uuid;

use super::DeadLetterTable;
use crate::postgres::clock::NOW;
use crate::postgres::errors::store_error;
use crate::postgres::texts::storable_text;

/// Makes dead letters due, and records the request. They are locked in the order of their ids, so that two operators never
/// wait for each other. Binds: the replay, the ids, the reason.
pub(super) fn replay() -> String {
    format!(
        "WITH chosen AS MATERIALIZED (
             SELECT id AS chosen_id FROM dlt_event WHERE id = ANY ($2) AND status <> 1 AND replay_at IS NULL
             ORDER BY id FOR NO KEY UPDATE
         ), replayed AS (
             UPDATE dlt_event SET replay_at = {NOW}, replay_id = $1 FROM chosen WHERE id = chosen_id RETURNING id
         )
         INSERT INTO replay (id, reason, matched) SELECT $1, $3, count(*) FROM replayed RETURNING matched"
    )
}

/// Each dead letter that still waits for the replay, and the last result of each other one. It is one statement, so
/// that a dead letter that is settled meanwhile is either pending or has a result. Binds: the replay.
pub(super) const RESULTS: &str = "SELECT id, NULL AS error_code, true AS pending FROM dlt_event WHERE replay_id = $1
     UNION ALL
     SELECT letter_id, error_code, false FROM retry_history AS answer WHERE replay_id = $1
         AND id = (SELECT max(id) FROM retry_history WHERE replay_id = $1 AND letter_id = answer.letter_id)
         AND NOT EXISTS (SELECT 1 FROM dlt_event WHERE id = answer.letter_id AND replay_id = $1)";

#[async_trait]
impl DeadLetterReplays for DeadLetterTable {
    async fn replay(&self, ids: Vec<String>, reason: Option<String>) -> Result<Replay, StoreError> {
        const DOING: &str = "replay dead letters";
        let id = Uuid::now_v7().to_string();
        let ids: Vec<String> = ids.iter().map(|id| storable_text(id)).collect();
        let replay = sqlx::query(AssertSqlSafe(replay())).bind(&id).bind(ids);
        let rows = self.database.write(DOING, replay.bind(reason.as_deref().map(storable_text))).await?;
        let matched = rows.first().map_or(Ok(0), |row| row.try_get::<i64, _>(0));
        Ok(Replay { matched: matched.map_err(|error| store_error(DOING, error))?.unsigned_abs(), id })
    }

    async fn replay_results(&self, replay_id: &str) -> Result<ReplayResults, StoreError> {
        const DOING: &str = "read the results of a replay";
        let rows = self.database.read(DOING, sqlx::query(RESULTS).bind(storable_text(replay_id))).await?;
        read_results(&rows).map_err(|error| store_error(DOING, error))
    }
}

fn read_results(rows: &[PgRow]) -> Result<ReplayResults, sqlx::Error> {
    let mut results = ReplayResults::default();
    for row in rows {
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
