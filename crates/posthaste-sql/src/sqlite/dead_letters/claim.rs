use std::sync::Arc;

use bytes::Bytes;
use posthaste_core::hub_store::{DeadLetter, DeadLetterClaimId, DeadLetterClaimRequest, Trigger};
use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::queries::{FIELD_COUNT, FIELDS, read_fields};
use crate::sqlite::clock::{NOW_MS, millis};
use crate::sqlite::json::json;
use crate::unreadable::text;

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

/// The dead letters that are not leased and not in `?1`.
fn free() -> String {
    format!("(locked_until IS NULL OR locked_until <= {NOW_MS}) AND id NOT IN (SELECT value FROM json_each(?1))")
}

/// A loose index scan: one seek per subscription, however many dead letters each has. A due time that is not a number
/// sorts after all numbers and is never due. A subscription id that is not text sorts after all texts.
pub(super) fn waiting() -> String {
    let free = free();
    format!(
        "WITH RECURSIVE subscription (id) AS (
             SELECT min(subscription_id) FROM dlt_event INDEXED BY dlt_event_waiting WHERE due IS NOT NULL
             UNION ALL
             SELECT (SELECT min(subscription_id) FROM dlt_event INDEXED BY dlt_event_waiting
                     WHERE due IS NOT NULL AND subscription_id > subscription.id)
             FROM subscription WHERE subscription.id IS NOT NULL
         ), waiting (id, due_in) AS MATERIALIZED (
             SELECT id, (SELECT CAST(due - {NOW_MS} AS INTEGER) FROM dlt_event INDEXED BY dlt_event_waiting
                         WHERE subscription_id = subscription.id AND due IS NOT NULL AND due <= {LAST_MS} AND {free}
                         ORDER BY due, dlt_event.id LIMIT 1)
             FROM subscription WHERE id IS NOT NULL
         )
         SELECT id, due_in FROM waiting WHERE due_in IS NOT NULL"
    )
}

/// The earliest due dead letters of one subscription. Binds: the ids in flight, the claim, its lease, the subscription,
/// how many.
pub(super) fn claim_of_subscription() -> String {
    let free = free();
    format!(
        "UPDATE dlt_event SET locked_by = ?2, locked_until = {NOW_MS} + ?3
         WHERE id IN (SELECT id FROM dlt_event INDEXED BY dlt_event_waiting
                      WHERE subscription_id = ?4 AND due IS NOT NULL AND due <= {NOW_MS} AND {free}
                      ORDER BY due, id LIMIT ?5)
         RETURNING {FIELDS}, id, (SELECT envelope FROM dlt_payload WHERE letter_id = dlt_event.id), retry_count,
             replay_at IS NOT NULL, replay_id, due, rowid"
    )
}

pub(super) async fn claim(
    connection: &mut SqliteConnection,
    request: Arc<DeadLetterClaimRequest>,
) -> Result<(Vec<DeadLetter>, Vec<Unreadable>), sqlx::Error> {
    let DeadLetterClaimRequest { claim_id, lease, in_flight, subscriptions } = &*request;
    let (sql, in_flight) = (claim_of_subscription(), json(in_flight)?);
    let (mut claimed, mut unreadable) = (Vec::new(), Vec::new());
    for (subscription, limit) in subscriptions {
        let query = sqlx::query(AssertSqlSafe(sql.clone())).bind(in_flight.clone()).bind(claim_id.to_string());
        let query = query.bind(millis(*lease)).bind(subscription).bind(i64::try_from(*limit).unwrap_or(i64::MAX));
        for row in &query.fetch_all(&mut *connection).await? {
            match read(row, claim_id) {
                Ok(letter) => claimed.push(letter),
                Err(error) => {
                    let reason = error.to_string();
                    give_up(connection, row.try_get(ROWID)?, &reason).await?;
                    unreadable.push((text(row, ID), reason));
                }
            }
        }
    }
    // An UPDATE returns its rows in any order.
    claimed.sort_by(|(due, a), (other_due, b)| (due, &a.id).cmp(&(other_due, &b.id)));
    Ok((claimed.into_iter().map(|(_, letter)| letter).collect(), unreadable))
}

/// Gives up dead letters whose subscription id is not text: no claim could name it.
pub(super) async fn give_up_nameless(connection: &mut SqliteConnection) -> Result<Vec<Unreadable>, sqlx::Error> {
    let nameless = "SELECT id, rowid FROM dlt_event INDEXED BY dlt_event_waiting
         WHERE subscription_id >= x'' AND due IS NOT NULL LIMIT 100";
    let mut unreadable = Vec::new();
    for row in &sqlx::query(nameless).fetch_all(&mut *connection).await? {
        let reason = "its subscription id is not text";
        give_up(connection, row.try_get(1)?, reason).await?;
        unreadable.push((text(row, 0), reason.to_owned()));
    }
    Ok(unreadable)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqlite::plans;

    /// The steps that read dead letters or sort.
    async fn plan_of(statement: &str) -> Vec<String> {
        let steps = plans::plan_of(statement).await.into_iter();
        steps.filter(|step| step.contains("dlt_event") || step.contains("B-TREE")).collect()
    }

    #[tokio::test]
    async fn a_look_is_a_seek_per_subscription_and_sorts_nothing() {
        let plan = plan_of(&waiting()).await;
        assert_eq!(
            plan,
            [
                "SEARCH dlt_event USING INDEX dlt_event_waiting",
                "SEARCH dlt_event USING INDEX dlt_event_waiting (subscription_id>?)",
                "SEARCH dlt_event USING INDEX dlt_event_waiting (subscription_id=? AND due>? AND due<?)",
            ]
        );
    }

    #[tokio::test]
    async fn a_claim_reads_the_due_dead_letters_of_one_subscription_in_order() {
        let plan = plan_of(&claim_of_subscription()).await;
        assert_eq!(
            plan,
            [
                "SEARCH dlt_event USING COVERING INDEX sqlite_autoindex_dlt_event_1 (id=?)",
                "SEARCH dlt_event USING INDEX dlt_event_waiting (subscription_id=? AND due>? AND due<?)",
            ]
        );
    }
}
