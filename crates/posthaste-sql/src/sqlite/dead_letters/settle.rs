use std::collections::HashSet;
use std::sync::Arc;

use posthaste_core::Settled;
use posthaste_core::hub_store::{DeadLetterStatus, DeadLetterUpdate, DueChange, Trigger};
use serde::Serialize;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use crate::sqlite::clock::{NOW_MS, millis};
use crate::sqlite::json::json;

/// A [`DeadLetterUpdate`] as the statements below read it from JSON.
#[derive(Serialize)]
struct Update<'a> {
    id: &'a str,
    claim_id: String,
    trigger: &'static str,
    status: Option<i16>,
    /// 1 or 0, to be added.
    retries: u8,
    requests: u8,
    answers_replay: bool,
    schedule: &'static str,
    schedule_after: i64,
    replay: &'static str,
    replay_after: i64,
    error: Option<&'a str>,
    error_code: Option<&'a str>,
    error_cause: Option<&'a str>,
    duration: i64,
}

impl<'a> Update<'a> {
    fn of(update: &'a DeadLetterUpdate) -> Self {
        let ((schedule, schedule_after), (replay, replay_after)) = (due(update.schedule), due(update.replay));
        let failure = update.failure.as_ref();
        Self {
            id: &update.id,
            claim_id: update.claim_id.to_string(),
            trigger: match update.trigger {
                Trigger::Scheduled => "SCHEDULED",
                Trigger::Replay { .. } => "REPLAY",
            },
            status: update.status.map(DeadLetterStatus::code),
            retries: update.is_scheduled_retry.into(),
            requests: update.is_attempt.into(),
            answers_replay: update.answers_replay,
            schedule,
            schedule_after,
            replay,
            replay_after,
            error: failure.map(|failure| failure.message.as_str()),
            error_code: failure.map(|failure| &*failure.code),
            error_cause: failure.and_then(|failure| failure.cause.as_deref()),
            duration: millis(update.took),
        }
    }
}

fn due(change: DueChange) -> (&'static str, i64) {
    match change {
        DueChange::Keep => ("keep", 0),
        DueChange::Clear => ("clear", 0),
        DueChange::After(wait) => ("move", millis(wait)),
    }
}

/// The dead letters that are still leased by the claims of their updates. One row, a JSON array.
const FENCE: &str = "SELECT json_group_array(letter.id)
     FROM json_each(?) AS asked CROSS JOIN dlt_event AS letter ON letter.id = asked.value ->> 'id'
     WHERE letter.locked_by = asked.value ->> 'claim_id' AND letter.status <> 1";

fn history() -> String {
    format!(
        "INSERT INTO retry_history
             (letter_id, error_code, error_message, error_cause, process_date, trigger, replay_id, duration_ms)
         SELECT letter.id, change.value ->> 'error_code', change.value ->> 'error', change.value ->> 'error_cause',
             {NOW_MS}, change.value ->> 'trigger',
             CASE WHEN change.value ->> 'answers_replay' THEN letter.replay_id END, change.value ->> 'duration'
         FROM json_each(?) AS change CROSS JOIN dlt_event AS letter ON letter.id = change.value ->> 'id'
         WHERE change.value ->> 'requests' = 1"
    )
}

fn update() -> String {
    format!(
        "UPDATE dlt_event SET
             status = coalesce(change.status, dlt_event.status),
             retry_count = retry_count + change.retries,
             attempts = attempts + change.requests,
             scheduled_at = CASE change.schedule
                 WHEN 'keep' THEN scheduled_at WHEN 'move' THEN {NOW_MS} + change.schedule_after END,
             replay_at = CASE change.replay WHEN 'keep' THEN replay_at WHEN 'move' THEN {NOW_MS} + change.replay_after END,
             replay_id = CASE change.replay WHEN 'clear' THEN NULL ELSE replay_id END,
             error = coalesce(change.error, dlt_event.error),
             error_code = coalesce(change.error_code, dlt_event.error_code),
             error_cause = CASE WHEN change.error IS NULL THEN dlt_event.error_cause ELSE change.error_cause END,
             locked_by = NULL,
             locked_until = NULL,
             updated_at = CASE change.requests WHEN 0 THEN updated_at ELSE {NOW_MS} END
         FROM (SELECT value ->> 'id' AS id, value ->> 'status' AS status, value ->> 'retries' AS retries,
                      value ->> 'requests' AS requests, value ->> 'schedule' AS schedule,
                      value ->> 'schedule_after' AS schedule_after, value ->> 'replay' AS replay,
                      value ->> 'replay_after' AS replay_after, value ->> 'error' AS error,
                      value ->> 'error_code' AS error_code, value ->> 'error_cause' AS error_cause
               FROM json_each(?)) AS change
         WHERE dlt_event.id = change.id"
    )
}

pub(super) async fn settle(
    connection: &mut SqliteConnection,
    updates: Arc<Vec<DeadLetterUpdate>>,
) -> Result<Vec<Settled>, sqlx::Error> {
    let updates: Vec<Update<'_>> = updates.iter().map(Update::of).collect();
    let leased: String = sqlx::query(FENCE).bind(json(&updates)?).fetch_one(&mut *connection).await?.try_get(0)?;
    let mut leased: HashSet<String> =
        serde_json::from_str(&leased).map_err(|error| sqlx::Error::Decode(error.into()))?;
    // If a dead letter occurs twice, the first update settles it.
    let applied: Vec<bool> = updates.iter().map(|update| leased.remove(update.id)).collect();
    let to_apply: Vec<&Update<'_>> =
        updates.iter().zip(&applied).filter(|(_, applied)| **applied).map(|(update, _)| update).collect();
    if !to_apply.is_empty() {
        let to_apply = json(&to_apply)?;
        sqlx::query(AssertSqlSafe(history())).bind(to_apply.clone()).execute(&mut *connection).await?;
        sqlx::query(AssertSqlSafe(update())).bind(to_apply).execute(connection).await?;
    }
    Ok(applied.into_iter().map(Settled::of).collect())
}
