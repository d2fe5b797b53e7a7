use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::hub_store::{
    DeadLetter, DeadLetterClaimId, DeadLetterClaimRequest, DeadLetterStore, DeadLetterUpdate, NewDeadLetter,
    WaitingSubscription,
};
use posthaste_core::{Settled, StoreError};
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::clock::{NOW_MS, millis, span};
use super::database::Database;
use super::errors::doing;
use super::json::json;
use crate::unreadable::report;

mod claim;
mod lease;
mod queries;
mod replay;
mod retention;
mod settle;

/// The maximum number of rows that one statement inserts.
const CHUNK: usize = 64;

/// The dead letters of the hub, in the table `dlt_event`.
#[derive(Clone)]
pub struct DeadLetterTable {
    database: Database,
    /// For writes that are many when endpoints are bad.
    background: Database,
}

impl DeadLetterTable {
    /// The dead letters of a database whose hub tables are up to date.
    pub fn new(database: Database) -> Self {
        Self { background: database.in_background(), database }
    }

    /// The waiting subscriptions, and true if there are dead letters whose subscription id is not text.
    async fn read_waiting(&self, in_flight: Vec<String>) -> Result<(Vec<WaitingSubscription>, bool), sqlx::Error> {
        let query = sqlx::query(AssertSqlSafe(claim::waiting())).bind(json(&in_flight)?);
        let (mut waiting, mut has_nameless) = (Vec::new(), false);
        for row in &query.fetch_all(self.database.readers()).await? {
            match row.try_get(0) {
                Ok(subscription_id) => {
                    waiting.push(WaitingSubscription { subscription_id, due_in: span(row.try_get(1)?) });
                }
                Err(_) => has_nameless = true,
            }
        }
        Ok((waiting, has_nameless))
    }

    /// Ends the leases of every process. Only for a process that knows that no other process uses the file.
    pub async fn void_leases(&self) -> Result<(), StoreError> {
        self.database.write("void the leases of dead letters", |connection| Box::pin(lease::void(connection))).await
    }
}

#[async_trait]
impl DeadLetterStore for DeadLetterTable {
    async fn insert(&self, letters: Vec<NewDeadLetter>) -> Result<(), StoreError> {
        let with_ids = letters.into_iter().map(|letter| (uuid::Uuid::now_v7().to_string(), letter)).collect();
        let write = self
            .background
            .write_with("insert dead letters", with_ids, |connection, letters| Box::pin(insert(connection, letters)));
        write.await
    }

    async fn waiting(&self, in_flight: Vec<String>) -> Result<Vec<WaitingSubscription>, StoreError> {
        let (waiting, has_nameless) = doing("look for due dead letters", self.read_waiting(in_flight)).await?;
        if has_nameless {
            let give_up =
                self.database.write("claim dead letters", |connection| Box::pin(claim::give_up_nameless(connection)));
            give_up.await?.iter().for_each(|(key, reason)| report("dlt_event", key, reason));
        }
        Ok(waiting)
    }

    async fn claim(&self, request: DeadLetterClaimRequest) -> Result<Vec<DeadLetter>, StoreError> {
        let claim = self.background.write_with("claim dead letters", request, |connection, request| {
            Box::pin(claim::claim(connection, request))
        });
        let (claimed, unreadable) = claim.await?;
        unreadable.iter().for_each(|(key, reason)| report("dlt_event", key, reason));
        Ok(claimed)
    }

    async fn settle(&self, updates: Vec<DeadLetterUpdate>) -> Result<Vec<Settled>, StoreError> {
        let settle = self.background.write_with("settle dead letters", updates, |connection, updates| {
            Box::pin(settle::settle(connection, updates))
        });
        settle.await
    }

    async fn renew(
        &self,
        claims: Vec<(String, DeadLetterClaimId)>,
        lease: Duration,
    ) -> Result<Vec<Settled>, StoreError> {
        let renew = self.database.write_with("renew the leases of dead letters", claims, move |connection, claims| {
            Box::pin(lease::renew(connection, claims, millis(lease)))
        });
        renew.await
    }

    async fn release(&self, claims: Vec<(String, DeadLetterClaimId)>) -> Result<(), StoreError> {
        let release = self.background.write_with("release dead letters", claims, |connection, claims| {
            Box::pin(lease::release(connection, claims))
        });
        release.await
    }

    async fn release_all(&self, owner: &str) -> Result<(), StoreError> {
        let owner = owner.to_owned();
        let release = self.background.write_with("release dead letters", owner, |connection, owner| {
            Box::pin(lease::release_all(connection, owner))
        });
        release.await
    }

    async fn end_schedules(&self, max_retry: u32) -> Result<(), StoreError> {
        const END: &str = "UPDATE dlt_event SET scheduled_at = NULL
             WHERE due IS NOT NULL AND scheduled_at IS NOT NULL AND retry_count >= iif(deferred, max(?1, 1), ?1)";
        let end = self.database.write("end scheduled retries", move |connection| {
            Box::pin(async move { sqlx::query(END).bind(max_retry).execute(connection).await.map(|_| ()) })
        });
        end.await
    }

    async fn remove_processed(&self, older_than: Duration, limit: usize) -> Result<u64, StoreError> {
        retention::remove_processed(&self.background, older_than, limit).await
    }
}

async fn insert(
    connection: &mut SqliteConnection,
    letters: Arc<Vec<(String, NewDeadLetter)>>,
) -> Result<(), sqlx::Error> {
    for chunk in letters.chunks(CHUNK) {
        let row = format!("(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {NOW_MS} + ?, {NOW_MS}, {NOW_MS})");
        let rows = vec![row; chunk.len()].join(", ");
        let mut query = sqlx::query_scalar(AssertSqlSafe(format!(
            "INSERT INTO dlt_event (id, delivery_id, event_id, subscription_id, subscriber_id, event_type, domain,
                 endpoint, attempts, error, error_code, error_cause, first_failed_at, deferred, status, scheduled_at,
                 created_at, updated_at)
             VALUES {rows} ON CONFLICT (delivery_id) DO NOTHING
             RETURNING id"
        )));
        for (id, letter) in chunk {
            let fields = &letter.fields;
            query = query
                .bind(id)
                .bind(&fields.delivery_id)
                .bind(&fields.event_id)
                .bind(&fields.subscription_id)
                .bind(&fields.subscriber_id)
                .bind(&fields.event_type)
                .bind(&fields.domain)
                .bind(&fields.endpoint)
                .bind(fields.attempts)
                .bind(&letter.error)
                .bind(&letter.error_code)
                .bind(&letter.error_cause)
                .bind(fields.first_failed_at.timestamp_millis())
                .bind(letter.is_deferred)
                .bind(letter.status().code())
                .bind(letter.first_delay.map(millis));
        }
        let inserted: HashSet<String> = query.fetch_all(&mut *connection).await?.into_iter().collect();
        if inserted.is_empty() {
            continue;
        }
        let rows = vec!["(?, ?, ?)"; inserted.len()].join(", ");
        let payloads = format!("INSERT INTO dlt_payload (letter_id, envelope, readable) VALUES {rows}");
        let mut insert = sqlx::query(AssertSqlSafe(payloads));
        for (id, letter) in chunk.iter().filter(|(id, _)| inserted.contains(id)) {
            insert = insert.bind(id).bind(&letter.envelope[..]).bind(&letter.readable);
        }
        insert.execute(&mut *connection).await?;
    }
    Ok(())
}
