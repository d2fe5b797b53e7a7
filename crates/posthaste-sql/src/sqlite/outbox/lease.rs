use std::collections::HashSet;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::outbox::{LOST_CLAIM_SCAN, LeaseSet, LeaseStore, Mode, SettledRows};
use sqlx::Row;

use super::OutboxStore;
use crate::sqlite::errors::store_error;
use crate::sqlite::json::json;

/// Restarts the leases of those rows that are still leased under one of the claim ids. Binds: the claim ids, the rows.
pub(super) const RENEW: &str = "UPDATE {table} SET locked_at = {now}
     WHERE seq IN (SELECT value FROM json_each(?2)) AND status NOT IN (1, 3)
       AND locked_by IN (SELECT value FROM json_each(?1))
     RETURNING seq";

/// Replaces the claim id of suspects that are about to be delivered. Binds: the claim ids, the rows, the claim id that
/// says that the delivery has started.
pub(super) const MARK_STARTED: &str = "UPDATE {table} SET locked_by = ?3, locked_at = {now}
     WHERE seq IN (SELECT value FROM json_each(?2)) AND status NOT IN (1, 3)
       AND locked_by IN (SELECT value FROM json_each(?1))
     RETURNING seq";

/// Ends the leases of those rows that are still leased under one of the claim ids, so that other processes need not
/// wait for their end. Returns the rows that exist. Binds: the claim ids, the rows.
pub(super) const RELEASE: &str = "UPDATE {table} SET
         locked_by = CASE WHEN locked_by IN (SELECT value FROM json_each(?1)) THEN NULL ELSE locked_by END,
         locked_at = CASE WHEN locked_by IN (SELECT value FROM json_each(?1)) THEN NULL ELSE locked_at END
     WHERE seq IN (SELECT value FROM json_each(?2))
     RETURNING seq";

/// The same for the rows of events. Binds: the claim ids, the event ids.
const RELEASE_EVENTS: &str = "UPDATE {table} SET
         locked_by = CASE WHEN locked_by IN (SELECT value FROM json_each(?1)) THEN NULL ELSE locked_by END,
         locked_at = CASE WHEN locked_by IN (SELECT value FROM json_each(?1)) THEN NULL ELSE locked_at END
     WHERE event_id IN (SELECT value FROM json_each(?2))
     RETURNING seq";

/// Ends the leases under these claim ids at the head of the table. No index has claim ids: it would cost every claim
/// more than this statement costs, which runs only after the result of a claim was lost. Binds: the claim ids.
fn release_claims(mode: Mode) -> String {
    let (index, which) = match mode {
        Mode::Ordered(_) => ("{table}_ready", "AND blocked = 0"),
        _ => ("{table}_pending", ""),
    };
    format!(
        "UPDATE {{table}} SET locked_by = NULL, locked_at = NULL
         WHERE seq IN (
             SELECT seq FROM (
                 SELECT seq, locked_by FROM {{table}} INDEXED BY {index}
                 WHERE status IN (0, 2) {which} AND due <= {{now_ms}} ORDER BY due, seq LIMIT {LOST_CLAIM_SCAN})
             WHERE locked_by IN (SELECT value FROM json_each(?1)))
         RETURNING seq"
    )
}

#[async_trait]
impl LeaseStore for OutboxStore {
    async fn renew(&self, claim_ids: &[String], rows: &[i64]) -> Result<SettledRows, StoreError> {
        let applied = self.change_leases("renew leases", RENEW.to_owned(), vec![json(claim_ids), json(rows)]).await?;
        Ok(SettledRows { applied, locked: HashSet::new() })
    }

    async fn release(&self, leases: &LeaseSet<'_>) -> Result<SettledRows, StoreError> {
        let (sql, binds) = match leases {
            LeaseSet::Rows { claim_ids, rows } => (RELEASE.to_owned(), vec![json(claim_ids), json(rows)]),
            LeaseSet::Events { claim_ids, ids } => (RELEASE_EVENTS.to_owned(), vec![json(claim_ids), json(ids)]),
            LeaseSet::Claims { claim_ids } => (release_claims(self.0.mode), vec![json(claim_ids)]),
        };
        let applied = self.change_leases("release leases", sql, binds).await?;
        Ok(SettledRows { applied, ..SettledRows::default() })
    }

    async fn mark_started(
        &self,
        claim_id: &str,
        started_claim_id: &str,
        rows: &[i64],
    ) -> Result<HashSet<i64>, StoreError> {
        let binds = vec![json(&[claim_id]), json(rows), Ok(started_claim_id.to_owned())];
        self.change_leases("claim from the outbox", MARK_STARTED.to_owned(), binds).await
    }
}

impl OutboxStore {
    /// Runs a statement about leases, and returns the rows that it returns.
    async fn change_leases(
        &self,
        doing: &'static str,
        sql: String,
        binds: Vec<Result<String, sqlx::Error>>,
    ) -> Result<HashSet<i64>, StoreError> {
        let binds: Result<Vec<String>, _> = binds.into_iter().collect();
        let (store, binds) = (self.clone(), binds.map_err(|error| store_error(doing, error))?);
        let write = self.0.database.write(doing, move |connection| {
            let mut change = sqlx::query(store.sql(&sql));
            for bind in &binds {
                change = change.bind(bind.clone());
            }
            Box::pin(async move {
                let changed = change.fetch_all(connection).await?;
                changed.iter().map(|row| row.try_get(0)).collect()
            })
        });
        write.await
    }
}
