use bytes::Bytes;
use chrono::{DateTime, Utc};
use posthaste_core::StoreError;
use posthaste_core::hub_store::{DeadLetter, DeadLetterClaimId, DeadLetterClaimRequest, Trigger, WaitingSubscription};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Row};

use super::queries::{FIELD_COUNT, FIELDS, read_fields};
use crate::outbox::limit;
use crate::postgres::clock::{CLOCK, NOW, micros, span};
use crate::postgres::database::Database;
use crate::postgres::log::{READ, STATEMENT_TIMEOUT, in_transaction, limited};
use crate::postgres::outbox::claim::SCAN;
use crate::session::Failed;
use crate::unreadable::{report, text};

/// The columns after [`FIELDS`] in a claim.
const ID: usize = FIELD_COUNT;
const ENVELOPE: usize = FIELD_COUNT + 1;
const RETRY_COUNT: usize = FIELD_COUNT + 2;
const IS_REPLAY: usize = FIELD_COUNT + 3;
const REPLAY_ID: usize = FIELD_COUNT + 4;
const DUE: usize = FIELD_COUNT + 5;

/// The dead letters that are not leased and not in `$1`.
///
/// `NOT IN (SELECT …)` looks each one up in a hash; `<> ALL` would compare it with every one that is left out.
fn free() -> String {
    format!("(locked_until IS NULL OR locked_until <= {NOW}) AND id NOT IN (SELECT unnest($1::text[]))")
}

/// The subscriptions with waiting dead letters, and how long until the first free one of each is due, in microseconds. A
/// loose index scan: one seek per subscription, however many dead letters each has. Binds: the ids in flight.
pub(super) fn waiting() -> String {
    let free = free();
    format!(
        "WITH RECURSIVE subscriptions AS (
             (SELECT subscription_id FROM dlt_event WHERE due IS NOT NULL ORDER BY subscription_id, due, id LIMIT 1)
             UNION ALL
             SELECT next.subscription_id FROM subscriptions CROSS JOIN LATERAL (
                 SELECT subscription_id FROM dlt_event
                 WHERE due IS NOT NULL AND subscription_id > subscriptions.subscription_id
                 ORDER BY subscription_id, due, id LIMIT 1
             ) AS next
         )
         SELECT subscription_id, (extract(epoch FROM first.due - {NOW}) * 1000000)::bigint
         FROM subscriptions CROSS JOIN LATERAL (
             SELECT due FROM dlt_event
             WHERE dlt_event.subscription_id = subscriptions.subscription_id AND due IS NOT NULL AND {free}
             ORDER BY dlt_event.subscription_id, due, id LIMIT 1
         ) AS first"
    )
}

/// Leases the earliest due dead letters of each subscription, and returns them in no order. Dead letters that another
/// process is claiming are left to it. Binds: the ids in flight, the claim, its lease in microseconds, the subscriptions,
/// how many of each.
pub(super) fn lease_due() -> String {
    let free = free();
    format!(
        "WITH chosen AS MATERIALIZED (
             SELECT letter.id FROM unnest($4::text[], $5::bigint[]) AS wanted (subscription_id, most)
             CROSS JOIN LATERAL (
                 SELECT id FROM dlt_event
                 WHERE dlt_event.subscription_id = wanted.subscription_id AND due IS NOT NULL AND due <= {NOW} AND {free}
                 ORDER BY dlt_event.subscription_id, due, id LIMIT wanted.most
                 FOR NO KEY UPDATE SKIP LOCKED
             ) AS letter
         )
         UPDATE dlt_event SET locked_by = $2, locked_until = {CLOCK} + $3 * interval '1 microsecond'
         WHERE id = ANY (ARRAY(SELECT id FROM chosen))
         RETURNING {FIELDS}, id, (SELECT envelope FROM dlt_payload WHERE letter_id = dlt_event.id), retry_count,
             replay_at IS NOT NULL, replay_id, due"
    )
}

/// Makes dead letters that cannot be read FAILED, and clears their due times. They wait for an operator. Binds: the ids,
/// the reasons.
fn give_up() -> String {
    format!(
        "UPDATE dlt_event SET status = 2, scheduled_at = NULL, replay_at = NULL, replay_id = NULL, locked_by = NULL,
             locked_until = NULL, error = reason, error_code = 'unreadable', error_cause = NULL,
             updated_at = date_trunc('milliseconds', {NOW})
         FROM unnest($1::text[], $2::text[]) AS unreadable (unreadable_id, reason) WHERE id = unreadable_id"
    )
}

pub(super) async fn read_waiting(
    database: &Database,
    in_flight: Vec<String>,
) -> Result<Vec<WaitingSubscription>, StoreError> {
    const DOING: &str = "look for due dead letters";
    let query = sqlx::query(AssertSqlSafe(waiting())).bind(in_flight);
    let rows = in_transaction(database.pipeline(), DOING, READ, query).await?;
    let read =
        |row: &PgRow| Ok(WaitingSubscription { subscription_id: row.try_get(0)?, due_in: span(row.try_get(1)?) });
    let waiting: Result<_, sqlx::Error> = rows.iter().map(read).collect();
    waiting.map_err(|error| crate::postgres::errors::store_error(DOING, error))
}

pub(super) async fn claim(
    database: &Database,
    request: &DeadLetterClaimRequest,
) -> Result<Vec<DeadLetter>, StoreError> {
    let claim = async {
        let mut work = database.pipeline().begin(SCAN).await?;
        let (claimed, unreadable) = lease(&mut work, request).await?;
        work.commit().await?;
        Ok::<_, Failed>((claimed, unreadable))
    };
    let (claimed, unreadable) = limited("claim dead letters", STATEMENT_TIMEOUT, claim).await?;
    unreadable.iter().for_each(|(id, reason)| report("dlt_event", id, reason));
    Ok(claimed)
}

/// The claimed dead letters, and the ids of those that cannot be read, each with the reason.
async fn lease(
    connection: &mut PgConnection,
    request: &DeadLetterClaimRequest,
) -> Result<(Vec<DeadLetter>, Vec<(String, String)>), sqlx::Error> {
    let DeadLetterClaimRequest { claim_id, lease, in_flight, subscriptions } = request;
    let (ids, counts): (Vec<&str>, Vec<i64>) =
        subscriptions.iter().map(|(id, count)| (id.as_str(), limit(*count))).unzip();
    let query = sqlx::query(AssertSqlSafe(lease_due())).bind(in_flight).bind(claim_id.to_string());
    let query = query.bind(micros(*lease)).bind(ids).bind(counts);
    let (mut claimed, mut unreadable) = (Vec::new(), Vec::new());
    for row in &query.fetch_all(&mut *connection).await? {
        match read(row, claim_id) {
            Ok(letter) => claimed.push(letter),
            Err(error) => unreadable.push((text(row, ID), error.to_string())),
        }
    }
    if !unreadable.is_empty() {
        let (ids, reasons): (Vec<&str>, Vec<&str>) =
            unreadable.iter().map(|(id, reason)| (id.as_str(), reason.as_str())).unzip();
        sqlx::query(AssertSqlSafe(give_up())).bind(ids).bind(reasons).execute(connection).await?;
    }
    claimed.sort_by(|(due, a), (other_due, b)| (due, &a.id).cmp(&(other_due, &b.id)));
    Ok((claimed.into_iter().map(|(_, letter)| letter).collect(), unreadable))
}

/// The due time and the dead letter.
fn read(row: &PgRow, claim_id: &DeadLetterClaimId) -> Result<(DateTime<Utc>, DeadLetter), sqlx::Error> {
    let trigger = match row.try_get(IS_REPLAY)? {
        true => Trigger::Replay { replay_id: row.try_get::<Option<String>, _>(REPLAY_ID)?.unwrap_or_default() },
        false => Trigger::Scheduled,
    };
    let letter = DeadLetter {
        id: row.try_get(ID)?,
        fields: read_fields(row)?,
        trigger,
        envelope: Bytes::from(row.try_get::<Vec<u8>, _>(ENVELOPE)?),
        retry_count: row.try_get::<i32, _>(RETRY_COUNT)?.unsigned_abs(),
        claim_id: claim_id.clone(),
    };
    Ok((row.try_get(DUE)?, letter))
}
