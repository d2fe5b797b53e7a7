use std::collections::HashSet;

use posthaste_core::{Disposition, Failure, Settled, Settlement};
use serde::Serialize;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::{NOW_MS, json, millis, settled};
use crate::letters::{Letter, LetterStatus, Trigger};

/// What is to be recorded of one letter. Its names are those in the statements below.
#[derive(Serialize)]
pub(super) struct Change {
    id: String,
    lock: String,
    trigger: &'static str,
    /// `None` leaves it as it is.
    status: Option<i64>,
    /// Added to the count of scheduled retries.
    retries: u8,
    /// Added to the count of requests. A letter for which none was made gets no history either.
    requests: u8,
    schedule: Due,
    replay: Due,
    /// For a [`Due::Move`], in milliseconds from now.
    after: i64,
    error: Option<String>,
    error_code: Option<String>,
    error_cause: Option<String>,
    duration: i64,
}

#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
enum Due {
    Keep,
    Clear,
    Move,
}

impl Change {
    pub(super) fn of(settlement: &Settlement<'_, Letter>) -> Self {
        let letter = &settlement.claimed.item;
        let is_scheduled = letter.trigger == Trigger::Scheduled;
        // The two clocks of a letter: the one that made it due, and the other.
        let own = |due| if is_scheduled { (due, Due::Keep) } else { (Due::Keep, due) };
        let (status, requests, (schedule, replay), after) = match settlement.disposition {
            Disposition::Done => (Some(LetterStatus::Processed), 1, (Due::Clear, Due::Clear), None),
            Disposition::Retry { after, counted: true, .. } => {
                (Some(LetterStatus::Failed), 1, own(Due::Move), Some(*after))
            }
            Disposition::Retry { after, counted: false, .. } => (None, 0, own(Due::Move), Some(*after)),
            Disposition::Dead(_) => (Some(LetterStatus::Failed), 1, own(Due::Clear), None),
        };
        let failure = failure_of(settlement.disposition);
        Self {
            id: letter.id.clone(),
            lock: letter.lock.clone(),
            trigger: if is_scheduled { "SCHEDULED" } else { "REPLAY" },
            status: status.map(LetterStatus::code),
            retries: if is_scheduled { requests } else { 0 },
            requests,
            schedule,
            replay,
            after: after.map_or(0, millis),
            error: failure.map(|failure| failure.message.clone()),
            error_code: failure.map(|failure| failure.code.to_string()),
            error_cause: failure.and_then(|failure| failure.cause.clone()),
            duration: millis(settlement.took),
        }
    }
}

/// The failure of an attempt that was made; one that was not made leaves no trace.
fn failure_of(disposition: &Disposition) -> Option<&Failure> {
    match disposition {
        Disposition::Retry { counted: true, failure, .. } => failure.as_ref(),
        Disposition::Dead(failure) => Some(failure),
        _ => None,
    }
}

/// Which letters are still held by the claim that wants to change them. One row, a JSON array.
const FENCE: &str = "SELECT json_group_array(letter.id)
     FROM json_each(?) AS asked CROSS JOIN dlt_event AS letter ON letter.id = asked.value ->> 'id'
     WHERE letter.locked_by = asked.value ->> 'lock' AND letter.status <> 1";

/// A scheduled success answers a replay that was asked for meanwhile; a scheduled failure leaves it waiting.
fn history() -> String {
    format!(
        "INSERT INTO retry_history
             (letter_id, error_code, error_message, error_cause, process_date, trigger, replay_id, duration_ms)
         SELECT letter.id, change.value ->> 'error_code', change.value ->> 'error', change.value ->> 'error_cause',
             {NOW_MS}, change.value ->> 'trigger',
             CASE WHEN change.value ->> 'trigger' = 'REPLAY' OR change.value ->> 'status' = 1 THEN letter.replay_id END,
             change.value ->> 'duration'
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
             scheduled_at = CASE change.schedule WHEN 'keep' THEN scheduled_at WHEN 'move' THEN {NOW_MS} + change.after END,
             replay_at = CASE change.replay WHEN 'keep' THEN replay_at WHEN 'move' THEN {NOW_MS} + change.after END,
             replay_id = CASE change.replay WHEN 'clear' THEN NULL ELSE replay_id END,
             error = coalesce(change.error, dlt_event.error),
             error_code = coalesce(change.error_code, dlt_event.error_code),
             error_cause = CASE WHEN change.error IS NULL THEN dlt_event.error_cause ELSE change.error_cause END,
             locked_by = NULL,
             locked_until = NULL,
             updated_at = CASE change.requests WHEN 0 THEN updated_at ELSE {NOW_MS} END
         FROM (SELECT value ->> 'id' AS id, value ->> 'status' AS status, value ->> 'retries' AS retries,
                      value ->> 'requests' AS requests, value ->> 'schedule' AS schedule, value ->> 'replay' AS replay,
                      value ->> 'after' AS after, value ->> 'error' AS error, value ->> 'error_code' AS error_code,
                      value ->> 'error_cause' AS error_cause
               FROM json_each(?)) AS change
         WHERE dlt_event.id = change.id"
    )
}

/// Carries out what may still be carried out; answers in the same order.
pub(super) async fn record(connection: &mut SqliteConnection, changes: &[Change]) -> Result<Vec<Settled>, sqlx::Error> {
    let held: String = sqlx::query(FENCE).bind(json(&changes)?).fetch_one(&mut *connection).await?.try_get(0)?;
    let mut held: HashSet<String> = serde_json::from_str(&held).map_err(|error| sqlx::Error::Decode(error.into()))?;
    // A letter that stands twice in one settlement is settled by the first.
    let applied: Vec<bool> = changes.iter().map(|change| held.remove(&change.id)).collect();
    let ours: Vec<&Change> =
        changes.iter().zip(&applied).filter(|(_, ours)| **ours).map(|(change, _)| change).collect();
    if !ours.is_empty() {
        let ours = json(&ours)?;
        sqlx::query(AssertSqlSafe(history())).bind(ours.clone()).execute(&mut *connection).await?;
        sqlx::query(AssertSqlSafe(update())).bind(ours).execute(connection).await?;
    }
    Ok(applied.into_iter().map(settled).collect())
}
