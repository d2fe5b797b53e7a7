use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use posthaste_core::hub_store::{ClaimedDeadLetters, DeadLetter, DeadLetterClaimId, DeadLetterClaimRequest, Trigger};
use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::queries::{FIELD_COUNT, FIELDS, read_fields};
use crate::sqlite::clock::{NOW_MS, millis, span};
use crate::sqlite::json::json;
use crate::sqlite::unreadable::text;

/// Later than every time that is ever due, and less than every text.
const LAST_MS: i64 = i64::MAX;

/// The columns after [`FIELDS`] in a claim.
const ID: usize = FIELD_COUNT;
const ENVELOPE: usize = FIELD_COUNT + 1;
const RETRY_COUNT: usize = FIELD_COUNT + 2;
const IS_REPLAY: usize = FIELD_COUNT + 3;
const REPLAY_ID: usize = FIELD_COUNT + 4;
const DUE: usize = FIELD_COUNT + 5;
const ROWID: usize = FIELD_COUNT + 6;

/// The id of a dead letter that cannot be read, and why.
type Unreadable = (String, String);

pub(super) async fn claim(
    connection: &mut SqliteConnection,
    request: Arc<DeadLetterClaimRequest>,
) -> Result<(ClaimedDeadLetters, Vec<Unreadable>), sqlx::Error> {
    let DeadLetterClaimRequest { claim_id, lease, in_flight, limit } = &*request;
    let free =
        format!("(locked_until IS NULL OR locked_until <= {NOW_MS}) AND id NOT IN (SELECT value FROM json_each(?1))");
    let claim = format!(
        "UPDATE dlt_event SET locked_by = ?2, locked_until = {NOW_MS} + ?3
         WHERE id IN (SELECT id FROM dlt_event WHERE due <= {NOW_MS} AND {free} ORDER BY due, id LIMIT ?4)
         RETURNING {FIELDS}, id, envelope, retry_count, replay_at IS NOT NULL, replay_id, due, rowid"
    );
    let in_flight = json(in_flight)?;
    let query = sqlx::query(AssertSqlSafe(claim)).bind(in_flight.clone()).bind(claim_id.to_string());
    let query = query.bind(millis(*lease)).bind(i64::try_from(*limit).unwrap_or(i64::MAX));
    let rows = query.fetch_all(&mut *connection).await?;
    let (mut claimed, mut unreadable) = (Vec::with_capacity(rows.len()), Vec::new());
    for row in &rows {
        match read(row, claim_id) {
            Ok(letter) => claimed.push(letter),
            Err(error) => {
                let reason = error.to_string();
                give_up(connection, row.try_get(ROWID)?, &reason).await?;
                unreadable.push((text(row, ID), reason));
            }
        }
    }
    // An UPDATE returns its rows in any order.
    claimed.sort_by(|(due, a), (other_due, b)| (due, &a.id).cmp(&(other_due, &b.id)));
    let letters: Vec<_> = claimed.into_iter().map(|(_, letter)| letter).collect();
    let next_due = if rows.len() < *limit {
        // A due time that is not a number sorts after all numbers and is never due.
        let next = format!(
            "SELECT CAST(due - {NOW_MS} AS INTEGER) FROM dlt_event
             WHERE due IS NOT NULL AND due <= {LAST_MS} AND {free} ORDER BY due, id LIMIT 1"
        );
        let row = sqlx::query(AssertSqlSafe(next)).bind(in_flight).fetch_optional(connection).await?;
        row.map(|row| row.try_get(0)).transpose()?.map(span)
    } else {
        // Unreadable rows made a full claim shorter: more dead letters may be due now.
        Some(Duration::ZERO).filter(|_| letters.len() < *limit)
    };
    Ok((ClaimedDeadLetters { letters, next_due }, unreadable))
}

/// Makes a dead letter that cannot be read FAILED, and clears its due times. It waits for an operator.
async fn give_up(connection: &mut SqliteConnection, rowid: i64, reason: &str) -> Result<(), sqlx::Error> {
    let give_up = format!(
        "UPDATE dlt_event SET status = 2, scheduled_at = NULL, replay_at = NULL, replay_id = NULL, locked_by = NULL,
             locked_until = NULL, error = ?2, error_code = 'unreadable', error_cause = NULL, updated_at = {NOW_MS}
         WHERE rowid = ?1"
    );
    sqlx::query(AssertSqlSafe(give_up)).bind(rowid).bind(reason).execute(connection).await.map(|_| ())
}

/// The due time and the dead letter.
fn read(row: &SqliteRow, claim_id: &DeadLetterClaimId) -> Result<(i64, DeadLetter), sqlx::Error> {
    let trigger = match row.try_get(IS_REPLAY)? {
        true => Trigger::Replay { replay_id: row.try_get::<Option<String>, _>(REPLAY_ID)?.unwrap_or_default() },
        false => Trigger::Scheduled,
    };
    let letter = DeadLetter {
        id: row.try_get(ID)?,
        fields: read_fields(row)?,
        trigger,
        envelope: Bytes::from(row.try_get::<Vec<u8>, _>(ENVELOPE)?),
        retry_count: row.try_get(RETRY_COUNT)?,
        claim_id: claim_id.clone(),
    };
    Ok((row.try_get(DUE)?, letter))
}
