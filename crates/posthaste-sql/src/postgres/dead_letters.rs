use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::hub_store::{
    DeadLetter, DeadLetterClaimId, DeadLetterClaimRequest, DeadLetterStore, DeadLetterUpdate, NewDeadLetter,
    WaitingSubscription,
};
use posthaste_core::{Settled, StoreError};
use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use super::clock::{micros, storable};
use super::database::Database;
use super::log::{STATEMENT_TIMEOUT, WRITE, limited};
use super::texts::storable_text;
use crate::outbox::chunks;
use crate::session::Failed;

mod claim;
mod lease;
#[cfg(test)]
mod plans;
mod queries;
mod replay;
mod retention;
mod settle;

/// The beginning of the transaction, in whole milliseconds.
const NOW_MS: &str = "date_trunc('milliseconds', now())";

/// Inserts each delivery once, with its payload. The rows are in the order of the unique key, so that two processes with
/// the same deliveries never wait for each other.
fn insert() -> String {
    format!(
        "WITH new AS MATERIALIZED (
             SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[],
                     $8::text[], $9::bigint[], $10::text[], $11::text[], $12::text[], $13::timestamptz[], $14::boolean[],
                     $15::smallint[], $16::bigint[], $17::bytea[], $18::text[])
                 AS new (id, delivery_id, event_id, subscription_id, subscriber_id, event_type, domain, endpoint,
                     attempts, error, error_code, error_cause, first_failed_at, deferred, status, delay, envelope,
                     readable)
         ), inserted AS (
             INSERT INTO dlt_event (id, delivery_id, event_id, subscription_id, subscriber_id, event_type, domain,
                 endpoint, attempts, error, error_code, error_cause, first_failed_at, deferred, status, scheduled_at,
                 created_at, updated_at)
             SELECT id, delivery_id, event_id, subscription_id, subscriber_id, event_type, domain, endpoint,
                 least(attempts, 2147483647), error, error_code, error_cause, first_failed_at, deferred, status,
                 now() + delay * interval '1 microsecond', {NOW_MS}, {NOW_MS}
             FROM new ORDER BY delivery_id
             ON CONFLICT (delivery_id) DO NOTHING
             RETURNING id AS inserted_id
         )
         INSERT INTO dlt_payload (letter_id, envelope, readable)
         SELECT id, envelope, readable FROM new JOIN inserted ON inserted_id = id"
    )
}

/// Clears the schedules of dead letters that had enough retries. They are locked in the order of their ids, as in every
/// statement that waits for locked dead letters, so that no two of them wait for each other. Binds: the limit.
const END_SCHEDULES: &str = "WITH ended AS MATERIALIZED (
         SELECT id AS ended_id FROM dlt_event
         WHERE due IS NOT NULL AND scheduled_at IS NOT NULL
           AND retry_count >= CASE WHEN deferred THEN greatest($1, 1) ELSE $1 END
         ORDER BY id FOR NO KEY UPDATE
     )
     UPDATE dlt_event SET scheduled_at = NULL FROM ended WHERE id = ended_id";

/// The dead letters of the hub, in the table `dlt_event`. Many processes may claim from it.
#[derive(Clone)]
pub struct DeadLetterTable {
    database: Database,
}

impl DeadLetterTable {
    /// The dead letters of a database whose hub tables are up to date.
    pub fn new(database: Database) -> Self {
        Self { database }
    }
}

#[async_trait]
impl DeadLetterStore for DeadLetterTable {
    async fn insert(&self, letters: Vec<NewDeadLetter>) -> Result<(), StoreError> {
        if letters.is_empty() {
            return Ok(());
        }
        let mut letters: Vec<(String, NewDeadLetter)> =
            letters.into_iter().map(|letter| (Uuid::now_v7().to_string(), letter)).collect();
        // All statements together insert in the order of the unique key, too. The ids keep the order of insertion.
        letters.sort_by(|(_, a), (_, b)| a.fields.delivery_id.cmp(&b.fields.delivery_id));
        let insert = async {
            let mut work = self.database.pipeline().begin(WRITE).await?;
            for chunk in chunks(&letters, |(_, letter)| letter.envelope.len() + letter.readable.len()) {
                insert_chunk(&mut work, chunk).await.map_err(Failed::Statement)?;
            }
            work.commit().await
        };
        limited("insert dead letters", STATEMENT_TIMEOUT, insert).await
    }

    async fn waiting(&self, in_flight: Vec<String>) -> Result<Vec<WaitingSubscription>, StoreError> {
        claim::read_waiting(&self.database, in_flight).await
    }

    async fn claim(&self, request: DeadLetterClaimRequest) -> Result<Vec<DeadLetter>, StoreError> {
        claim::claim(&self.database, &request).await
    }

    async fn settle(&self, updates: Vec<DeadLetterUpdate>) -> Result<Vec<Settled>, StoreError> {
        settle::settle(&self.database, &updates).await
    }

    async fn renew(
        &self,
        claims: Vec<(String, DeadLetterClaimId)>,
        lease: Duration,
    ) -> Result<Vec<Settled>, StoreError> {
        lease::renew(&self.database, &claims, lease).await
    }

    async fn release(&self, claims: Vec<(String, DeadLetterClaimId)>) -> Result<(), StoreError> {
        lease::release(&self.database, &claims).await
    }

    async fn release_all(&self, owner: &str) -> Result<(), StoreError> {
        lease::release_all(&self.database, owner).await
    }

    async fn end_schedules(&self, max_retry: u32) -> Result<(), StoreError> {
        let end = sqlx::query(END_SCHEDULES).bind(i64::from(max_retry));
        self.database.write("end scheduled retries", end).await.map(|_| ())
    }

    async fn remove_processed(&self, older_than: Duration, limit: usize) -> Result<u64, StoreError> {
        retention::remove_processed(&self.database, older_than, limit).await
    }
}

async fn insert_chunk(connection: &mut PgConnection, letters: &[(String, NewDeadLetter)]) -> Result<(), sqlx::Error> {
    fn column<'a, T>(letters: &'a [(String, NewDeadLetter)], of: impl Fn(&'a NewDeadLetter) -> T) -> Vec<T> {
        letters.iter().map(|(_, letter)| of(letter)).collect()
    }
    fn texts<'a>(letters: &'a [(String, NewDeadLetter)], of: impl Fn(&'a NewDeadLetter) -> &'a str) -> Vec<String> {
        column(letters, |letter| storable_text(of(letter)))
    }
    let ids: Vec<&str> = letters.iter().map(|(id, _)| id.as_str()).collect();
    let insert = sqlx::query(AssertSqlSafe(insert()))
        .bind(ids)
        .bind(texts(letters, |letter| &letter.fields.delivery_id))
        .bind(texts(letters, |letter| &letter.fields.event_id))
        .bind(texts(letters, |letter| &letter.fields.subscription_id))
        .bind(texts(letters, |letter| &letter.fields.subscriber_id))
        .bind(texts(letters, |letter| &letter.fields.event_type))
        .bind(texts(letters, |letter| &letter.fields.domain))
        .bind(texts(letters, |letter| &letter.fields.endpoint))
        .bind(column(letters, |letter| i64::from(letter.fields.attempts)))
        .bind(texts(letters, |letter| &letter.error))
        .bind(texts(letters, |letter| &letter.error_code))
        .bind(column(letters, |letter| letter.error_cause.as_deref().map(storable_text)))
        .bind(column(letters, |letter| storable(letter.fields.first_failed_at)))
        .bind(column(letters, |letter| letter.is_deferred))
        .bind(column(letters, |letter| letter.status().code()))
        .bind(column(letters, |letter| letter.first_delay.map(micros)))
        .bind(column(letters, |letter| &letter.envelope[..]))
        .bind(texts(letters, |letter| &letter.readable));
    insert.execute(connection).await.map(|_| ())
}
