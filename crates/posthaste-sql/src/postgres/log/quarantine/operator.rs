use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{
    ExpiredRecords, QuarantineCount, QuarantineCursor, QuarantineFilter, QuarantinePage, QuarantineStore,
    QuarantinedRecord, QuarantinedRow,
};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, FromRow, Row};

use super::super::{LogTables, READ, WRITE};
use super::list::{self, all_columns, shown_columns};
use super::retention;
use crate::postgres::clock::{CLOCK, micros};
use crate::postgres::errors::store_error;
use crate::postgres::texts::storable_text;
use crate::unreadable::readable;

const COUNTS: &str = "SELECT group_name, topic, records FROM quarantine_depth ORDER BY group_name, topic";

/// An update of the records with these ids that meet the condition. They are locked in the order of their ids, so that
/// two operators never wait for each other.
fn update(condition: &str, set: &str, returning: &str) -> String {
    format!(
        "WITH chosen AS MATERIALIZED (
             SELECT id AS chosen_id FROM quarantined_record WHERE id = ANY ($1) AND status = 0 AND {condition}
             ORDER BY id FOR NO KEY UPDATE
         )
         UPDATE quarantined_record SET {set} FROM chosen WHERE id = chosen_id
         RETURNING {returning}"
    )
}

/// True for a record that no replay publishes now.
pub(super) fn unclaimed() -> String {
    format!("(claimed_until IS NULL OR claimed_until <= {CLOCK})")
}

/// Binds: the ids, the claim, the microseconds of its lease.
pub(in super::super) fn claim() -> String {
    let set = format!("claim_id = $2, claimed_until = {CLOCK} + $3 * interval '1 microsecond'");
    update(&format!("replayable AND {}", unclaimed()), &set, &all_columns())
}

/// Binds: the ids, the claim.
pub(in super::super) fn mark_replayed() -> String {
    let set = format!("status = 1, status_reason = NULL, claim_id = NULL, claimed_until = NULL, updated_at = {CLOCK}");
    update("claim_id = $2", &set, "id")
}

/// Binds: the ids, the claim, why.
pub(in super::super) fn release() -> String {
    let set = format!("status_reason = $3, claim_id = NULL, claimed_until = NULL, updated_at = {CLOCK}");
    update("claim_id = $2", &set, "id")
}

/// Binds: the ids, the reason.
pub(in super::super) fn discard() -> String {
    let set = format!("status = 2, status_reason = $2, claim_id = NULL, claimed_until = NULL, updated_at = {CLOCK}");
    update(&unclaimed(), &set, "id")
}

fn ids(what: &'static str, rows: &[PgRow]) -> Result<Vec<String>, StoreError> {
    let ids: Result<_, _> = rows.iter().map(|row| row.try_get(0)).collect();
    ids.map_err(|error| store_error(what, error))
}

#[async_trait]
impl QuarantineStore for LogTables {
    async fn counts(&self) -> Result<Vec<QuarantineCount>, StoreError> {
        let rows = self.operate("count quarantined records", READ, sqlx::query(COUNTS)).await?;
        Ok(readable("quarantine_depth", &rows, 0, |row| {
            let (group, topic, records) = <(String, String, i64)>::from_row(row)?;
            Ok(QuarantineCount { group, topic, records: u64::try_from(records).unwrap_or_default() })
        }))
    }

    async fn list(
        &self,
        filter: &QuarantineFilter,
        after: Option<&QuarantineCursor>,
        limit: u32,
    ) -> Result<QuarantinePage, StoreError> {
        list::list(self, filter, after, limit).await
    }

    async fn rows(&self, ids: &[String]) -> Result<Vec<QuarantinedRow>, StoreError> {
        let sql = format!("SELECT {} FROM quarantined_record WHERE id = ANY ($1)", shown_columns());
        let query = sqlx::query(AssertSqlSafe(sql)).bind(ids);
        let rows = self.operate("read quarantined records", READ, query).await?;
        Ok(readable("quarantined_record", &rows, 0, list::row))
    }

    async fn get(&self, id: &str) -> Result<Option<QuarantinedRecord>, StoreError> {
        let sql = format!("SELECT {} FROM quarantined_record WHERE id = $1", all_columns());
        let query = sqlx::query(AssertSqlSafe(sql)).bind(storable_text(id));
        let rows = self.operate("read a quarantined record", READ, query).await?;
        Ok(readable("quarantined_record", &rows, 0, list::record).pop())
    }

    async fn claim(
        &self,
        ids: &[String],
        claim_id: &str,
        lease: Duration,
    ) -> Result<Vec<QuarantinedRecord>, StoreError> {
        let claim = sqlx::query(AssertSqlSafe(claim())).bind(ids).bind(claim_id).bind(micros(lease));
        let rows = self.operate("claim quarantined records", WRITE, claim).await?;
        Ok(readable("quarantined_record", &rows, 0, list::record))
    }

    async fn mark_replayed(&self, replayed: &[String], claim_id: &str) -> Result<Vec<String>, StoreError> {
        const DOING: &str = "mark quarantined records as replayed";
        let mark = sqlx::query(AssertSqlSafe(mark_replayed())).bind(replayed).bind(claim_id);
        ids(DOING, &self.operate(DOING, WRITE, mark).await?)
    }

    async fn release(&self, ids: &[String], claim_id: &str, why: &str) -> Result<(), StoreError> {
        let release = sqlx::query(AssertSqlSafe(release())).bind(ids).bind(claim_id).bind(storable_text(why));
        self.operate("release quarantined records", WRITE, release).await.map(|_| ())
    }

    async fn discard(&self, unneeded: &[String], reason: &str) -> Result<Vec<String>, StoreError> {
        const DOING: &str = "discard quarantined records";
        let discard = sqlx::query(AssertSqlSafe(discard())).bind(unneeded).bind(storable_text(reason));
        ids(DOING, &self.operate(DOING, WRITE, discard).await?)
    }

    async fn remove_expired(&self, age: Duration, limit: usize) -> Result<ExpiredRecords, StoreError> {
        retention::remove_expired(self, age, limit).await
    }
}
