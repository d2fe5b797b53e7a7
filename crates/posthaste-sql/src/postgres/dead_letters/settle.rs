use std::collections::HashSet;

use posthaste_core::hub_store::{DeadLetterClaimId, DeadLetterStatus, DeadLetterUpdate, DueChange, Trigger};
use posthaste_core::{Failure, Settled, StoreError};
use sqlx::{AssertSqlSafe, PgConnection};

use super::lease::{Leased, columns, lock_claimed, still_claimed};
use crate::postgres::clock::{CLOCK, NOW, micros};
use crate::postgres::database::Database;
use crate::postgres::log::{STATEMENT_TIMEOUT, WRITE, limited};
use crate::postgres::texts::storable_text;
use crate::session::Failed;

/// Adds to the histories and updates dead letters that this transaction has locked. Both read the dead letters as they
/// were before. Binds: see [`apply`].
pub(super) fn update() -> String {
    format!(
        "WITH change AS MATERIALIZED (
             SELECT * FROM unnest($1::text[], $2::text[], $3::smallint[], $4::integer[], $5::integer[], $6::boolean[],
                     $7::text[], $8::bigint[], $9::text[], $10::bigint[], $11::text[], $12::text[], $13::text[],
                     $14::bigint[])
                 AS change (letter_id, trigger, new_status, retries, requests, answers_replay, schedule, schedule_after,
                     replay, replay_after, new_error, new_code, new_cause, duration)
         ), history AS (
             INSERT INTO retry_history
                 (letter_id, error_code, error_message, error_cause, process_date, trigger, replay_id, duration_ms)
             SELECT letter.id, new_code, new_error, new_cause, {CLOCK}, change.trigger,
                 CASE WHEN answers_replay THEN letter.replay_id END, duration
             FROM change JOIN dlt_event AS letter ON letter.id = change.letter_id
             WHERE requests = 1
         )
         UPDATE dlt_event SET
             status = coalesce(new_status, status),
             retry_count = retry_count + retries,
             attempts = attempts + requests,
             scheduled_at = CASE schedule
                 WHEN 'keep' THEN scheduled_at WHEN 'move' THEN {NOW} + schedule_after * interval '1 microsecond' END,
             replay_at = CASE replay
                 WHEN 'keep' THEN replay_at WHEN 'move' THEN {NOW} + replay_after * interval '1 microsecond' END,
             replay_id = CASE replay WHEN 'clear' THEN NULL ELSE replay_id END,
             error = coalesce(new_error, error),
             error_code = coalesce(new_code, error_code),
             error_cause = CASE WHEN new_error IS NULL THEN error_cause ELSE new_cause END,
             locked_by = NULL,
             locked_until = NULL,
             updated_at = CASE requests WHEN 0 THEN updated_at ELSE date_trunc('milliseconds', {NOW}) END
         FROM change WHERE id = change.letter_id"
    )
}

pub(super) async fn settle(database: &Database, updates: &[DeadLetterUpdate]) -> Result<Vec<Settled>, StoreError> {
    let settle = async {
        let mut work = database.pipeline().begin(WRITE).await?;
        let settled = settle_in(&mut work, updates).await?;
        work.commit().await?;
        Ok::<_, Failed>(settled)
    };
    limited("settle dead letters", STATEMENT_TIMEOUT, settle).await
}

async fn settle_in(connection: &mut PgConnection, updates: &[DeadLetterUpdate]) -> Result<Vec<Settled>, sqlx::Error> {
    let claims: Vec<(String, DeadLetterClaimId)> =
        updates.iter().map(|update| (update.id.clone(), update.claim_id.clone())).collect();
    let (ids, claim_ids) = columns(&claims);
    let lock = sqlx::query_as(AssertSqlSafe(lock_claimed())).bind(ids).bind(claim_ids);
    let leased: Vec<(String, String)> = lock.fetch_all(&mut *connection).await?;
    let leased: Leased = leased.into_iter().collect();
    let is_leased = |(id, claim_id): &(String, DeadLetterClaimId)| leased.contains(&(id.clone(), claim_id.to_string()));
    let missing: Vec<(String, DeadLetterClaimId)> = claims.iter().filter(|claim| !is_leased(claim)).cloned().collect();
    let locked = match missing.is_empty() {
        true => Leased::new(),
        false => still_claimed(connection, &missing).await?,
    };
    let (mut settled, mut applied, mut seen) = (Vec::with_capacity(updates.len()), Vec::new(), HashSet::new());
    for (update, claim) in updates.iter().zip(&claims) {
        let result = if is_leased(claim) {
            // If a dead letter occurs twice, the first update settles it.
            Settled::of(seen.insert(update.id.as_str()))
        } else if locked.contains(&(claim.0.clone(), claim.1.to_string())) {
            Settled::Locked
        } else {
            Settled::LostLease
        };
        if result == Settled::Applied {
            applied.push(update);
        }
        settled.push(result);
    }
    if !applied.is_empty() {
        apply(connection, &applied).await?;
    }
    Ok(settled)
}

async fn apply(connection: &mut PgConnection, updates: &[&DeadLetterUpdate]) -> Result<(), sqlx::Error> {
    fn column<'a, T>(updates: &[&'a DeadLetterUpdate], of: impl Fn(&'a DeadLetterUpdate) -> T) -> Vec<T> {
        updates.iter().map(|update| of(update)).collect()
    }
    fn failure<'a>(
        updates: &[&'a DeadLetterUpdate],
        of: impl Fn(&'a Failure) -> Option<&'a str>,
    ) -> Vec<Option<String>> {
        column(updates, |update| update.failure.as_ref().and_then(&of).map(storable_text))
    }
    let update = sqlx::query(AssertSqlSafe(update()))
        .bind(column(updates, |update| update.id.as_str()))
        .bind(column(updates, |update| match update.trigger {
            Trigger::Scheduled => "SCHEDULED",
            Trigger::Replay { .. } => "REPLAY",
        }))
        .bind(column(updates, |update| update.status.map(DeadLetterStatus::code)))
        .bind(column(updates, |update| i32::from(update.is_scheduled_retry)))
        .bind(column(updates, |update| i32::from(update.is_attempt)))
        .bind(column(updates, |update| update.answers_replay))
        .bind(column(updates, |update| due(update.schedule).0))
        .bind(column(updates, |update| due(update.schedule).1))
        .bind(column(updates, |update| due(update.replay).0))
        .bind(column(updates, |update| due(update.replay).1))
        .bind(failure(updates, |failure| Some(failure.message.as_str())))
        .bind(failure(updates, |failure| Some(&*failure.code)))
        .bind(failure(updates, |failure| failure.cause.as_deref()))
        .bind(column(updates, |update| i64::try_from(update.took.as_millis()).unwrap_or(i64::MAX)));
    update.execute(connection).await.map(|_| ())
}

fn due(change: DueChange) -> (&'static str, i64) {
    match change {
        DueChange::Keep => ("keep", 0),
        DueChange::Clear => ("clear", 0),
        DueChange::After(wait) => ("move", micros(wait)),
    }
}
