use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{
    ExpiredRecords, QuarantineCount, QuarantineCursor, QuarantineFilter, QuarantinePage, QuarantineStore,
    QuarantinedRecord, QuarantinedRow,
};
use sqlx::sqlite::SqliteConnection;
use sqlx::{AssertSqlSafe, FromRow};

use super::super::LogTables;
use super::list::{self, RECORDS, all_columns, shown_columns};
use super::retention;
use crate::sqlite::clock::{NOW_MS, millis};
use crate::sqlite::errors::doing;
use crate::sqlite::json::json;
use crate::unreadable::readable;

const COUNTS: &str = "SELECT group_name, topic, records FROM quarantine_depth ORDER BY group_name, topic";

/// The ids of a request. A lookup for each: the plus in `+status` keeps the planner from reading all records of a status
/// by its index.
const IDS: &str = "id IN (SELECT value FROM json_each(?1))";

/// Binds: the ids, the claim, the milliseconds of its lease.
fn claim() -> String {
    format!(
        "UPDATE quarantined_record SET claim_id = ?2, claimed_until = {NOW_MS} + ?3
         WHERE {IDS} AND +status = 0 AND replayable AND (claimed_until IS NULL OR claimed_until <= {NOW_MS})
         RETURNING id"
    )
}

/// Binds: the ids, the claim.
fn mark_replayed() -> String {
    format!(
        "UPDATE quarantined_record SET status = 1, status_reason = NULL, claim_id = NULL, claimed_until = NULL,
             updated_at = {NOW_MS}
         WHERE {IDS} AND +status = 0 AND claim_id = ?2
         RETURNING id"
    )
}

/// Binds: the ids, the claim, why.
fn release() -> String {
    format!(
        "UPDATE quarantined_record SET status_reason = ?3, claim_id = NULL, claimed_until = NULL, updated_at = {NOW_MS}
         WHERE {IDS} AND +status = 0 AND claim_id = ?2
         RETURNING id"
    )
}

/// Binds: the ids, the reason.
fn discard() -> String {
    format!(
        "UPDATE quarantined_record SET status = 2, status_reason = ?2, claim_id = NULL, claimed_until = NULL,
             updated_at = {NOW_MS}
         WHERE {IDS} AND +status = 0 AND (claimed_until IS NULL OR claimed_until <= {NOW_MS})
         RETURNING id"
    )
}

/// A statement that changes records, and its binds after the ids.
struct Change {
    sql: String,
    ids: Vec<String>,
    texts: Vec<String>,
    number: Option<i64>,
}

async fn run(connection: &mut SqliteConnection, change: Arc<Change>) -> Result<Vec<String>, sqlx::Error> {
    let mut statement = sqlx::query_scalar(AssertSqlSafe(change.sql.as_str())).bind(json(&change.ids)?);
    for text in &change.texts {
        statement = statement.bind(text.as_str());
    }
    if let Some(number) = change.number {
        statement = statement.bind(number);
    }
    statement.fetch_all(connection).await
}

impl LogTables {
    /// Returns the ids of the records that were changed.
    async fn change_quarantine(&self, what: &'static str, change: Change) -> Result<Vec<String>, StoreError> {
        self.database.write_with(what, change, |connection, change| Box::pin(run(connection, change))).await
    }

    async fn quarantined_records(&self, ids: &[String]) -> Result<Vec<QuarantinedRecord>, sqlx::Error> {
        let sql = format!("SELECT {} FROM {RECORDS} WHERE {IDS}", all_columns());
        let rows = sqlx::query(AssertSqlSafe(sql)).bind(json(ids)?).fetch_all(self.database.operators()).await?;
        Ok(readable("quarantined_record", &rows, 0, list::record))
    }

    async fn quarantined_rows(&self, ids: &[String]) -> Result<Vec<QuarantinedRow>, sqlx::Error> {
        let sql = format!("SELECT {} FROM {RECORDS} WHERE {IDS}", shown_columns());
        let rows = sqlx::query(AssertSqlSafe(sql)).bind(json(ids)?).fetch_all(self.database.operators()).await?;
        Ok(readable("quarantined_record", &rows, 0, list::row))
    }
}

#[async_trait]
impl QuarantineStore for LogTables {
    async fn counts(&self) -> Result<Vec<QuarantineCount>, StoreError> {
        let query = sqlx::query(COUNTS).fetch_all(self.database.operators());
        let rows = doing("count quarantined records", query).await?;
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
        doing("list quarantined records", list::list(self.database.operators(), filter, after, limit)).await
    }

    async fn rows(&self, ids: &[String]) -> Result<Vec<QuarantinedRow>, StoreError> {
        doing("read quarantined records", self.quarantined_rows(ids)).await
    }

    async fn get(&self, id: &str) -> Result<Option<QuarantinedRecord>, StoreError> {
        let mut found = doing("read a quarantined record", self.quarantined_records(&[id.to_owned()])).await?;
        Ok(found.pop())
    }

    async fn claim(
        &self,
        ids: &[String],
        claim_id: &str,
        lease: Duration,
    ) -> Result<Vec<QuarantinedRecord>, StoreError> {
        const DOING: &str = "claim quarantined records";
        let texts = vec![claim_id.to_owned()];
        let change = Change { sql: claim(), ids: ids.to_vec(), texts, number: Some(millis(lease)) };
        let claimed = self.change_quarantine(DOING, change).await?;
        doing(DOING, self.quarantined_records(&claimed)).await
    }

    async fn mark_replayed(&self, ids: &[String], claim_id: &str) -> Result<Vec<String>, StoreError> {
        let texts = vec![claim_id.to_owned()];
        let change = Change { sql: mark_replayed(), ids: ids.to_vec(), texts, number: None };
        self.change_quarantine("mark quarantined records as replayed", change).await
    }

    async fn release(&self, ids: &[String], claim_id: &str, why: &str) -> Result<(), StoreError> {
        let texts = vec![claim_id.to_owned(), why.to_owned()];
        let change = Change { sql: release(), ids: ids.to_vec(), texts, number: None };
        self.change_quarantine("release quarantined records", change).await.map(|_| ())
    }

    async fn discard(&self, ids: &[String], reason: &str) -> Result<Vec<String>, StoreError> {
        let texts = vec![reason.to_owned()];
        let change = Change { sql: discard(), ids: ids.to_vec(), texts, number: None };
        self.change_quarantine("discard quarantined records", change).await
    }

    async fn remove_expired(&self, age: Duration, limit: usize) -> Result<ExpiredRecords, StoreError> {
        retention::remove_expired(self, age, limit).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqlite::plans::plan_of;

    #[tokio::test]
    async fn changed_records_are_looked_up_by_their_ids() {
        for sql in [claim(), mark_replayed(), release(), discard()] {
            let plan = plan_of(&sql).await;
            let lookup = "SEARCH quarantined_record USING INDEX sqlite_autoindex_quarantined_record_1 (id=?)";
            assert!(plan.iter().any(|step| step == lookup), "{plan:?}");
        }
    }
}
