use std::collections::HashSet;
use std::sync::Arc;

use posthaste_core::{Disposition, Failure, StoreError};
use serde::Serialize;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::Outbox;
use crate::outbox::error_text;
use crate::sqlite::clock::modifier;

/// What is to be recorded of some rows, all in one transaction.
#[derive(Default)]
pub(super) struct Records {
    /// Row and generation of its claim, of all of them.
    fenced: Vec<(i64, i64)>,
    done: Vec<i64>,
    changes: Vec<Change>,
}

/// Anything but delivered. Its names are those in `CHANGE`.
#[derive(Serialize)]
struct Change {
    seq: i64,
    status: u8,
    counted: u8,
    /// A modifier of the database's time.
    wait: Option<String>,
    error: Option<String>,
}

/// Which of the rows may be changed: pending ones, claimed under an ownership that still stands. One row, a JSON array.
pub(super) const FENCE: &str = "SELECT json_group_array(asked.value ->> 0)
     FROM {table}_owner AS fence CROSS JOIN json_each(?1) AS asked CROSS JOIN {table} ON {table}.seq = asked.value ->> 0
     WHERE fence.owner = ?2 AND fence.generation = asked.value ->> 1 AND {table}.status IN (0, 2)";

pub(super) const DONE: &str = "UPDATE {table} SET status = 1, done_at = {now}, locked_by = NULL, locked_at = NULL
     WHERE seq IN (SELECT value FROM json_each(?))";

pub(super) const CHANGE: &str = "UPDATE {table} SET
         status = change.status,
         attempts = attempts + change.counted,
         available_at = coalesce(strftime('%Y-%m-%dT%H:%M:%fZ', 'now', change.wait), available_at),
         done_at = CASE change.status WHEN 3 THEN {now} END,
         last_error = coalesce(change.error, last_error),
         locked_by = NULL,
         locked_at = NULL
     FROM (SELECT value ->> 'seq' AS seq, value ->> 'status' AS status, value ->> 'counted' AS counted,
                  value ->> 'wait' AS wait, value ->> 'error' AS error
           FROM json_each(?)) AS change
     WHERE {table}.seq = change.seq";

impl Records {
    pub(super) fn settle(&mut self, seq: i64, generation: i64, disposition: &Disposition) {
        match disposition {
            Disposition::Done => {
                self.fenced.push((seq, generation));
                self.done.push(seq);
            }
            Disposition::Retry { after, counted, failure } => {
                self.fenced.push((seq, generation));
                self.changes.push(Change {
                    seq,
                    // A wait that nobody is to blame for leaves the row as good as new.
                    status: if *counted || failure.is_some() { 2 } else { 0 },
                    counted: u8::from(*counted),
                    wait: Some(modifier(*after)),
                    error: failure.as_ref().map(error_text),
                });
            }
            Disposition::Dead(failure) => self.dead(seq, generation, failure),
        }
    }

    pub(super) fn dead(&mut self, seq: i64, generation: i64, failure: &Failure) {
        self.fenced.push((seq, generation));
        self.changes.push(Change { seq, status: 3, counted: 0, wait: None, error: Some(error_text(failure)) });
    }
}

impl Outbox {
    /// Carries out what may still be carried out, and answers with those rows.
    pub(super) async fn record(&self, records: Records) -> Result<HashSet<i64>, StoreError> {
        if records.fenced.is_empty() {
            return Ok(HashSet::new());
        }
        let (outbox, records) = (self.clone(), Arc::new(records));
        self.0
            .database
            .write("settle in the outbox", move |connection| {
                let (outbox, records) = (outbox.clone(), records.clone());
                Box::pin(async move { outbox.carry_out(connection, &records).await })
            })
            .await
    }

    async fn carry_out(
        &self,
        connection: &mut SqliteConnection,
        records: &Records,
    ) -> Result<HashSet<i64>, sqlx::Error> {
        let fence = sqlx::query(self.sql(FENCE)).bind(json(&records.fenced)?).bind(self.0.ownership.owner().to_owned());
        let ours: String = fence.fetch_one(&mut *connection).await?.try_get(0)?;
        let ours: HashSet<i64> = serde_json::from_str(&ours).map_err(|error| sqlx::Error::Decode(error.into()))?;
        let done: Vec<i64> = records.done.iter().copied().filter(|seq| ours.contains(seq)).collect();
        let changes: Vec<&Change> = records.changes.iter().filter(|change| ours.contains(&change.seq)).collect();
        if !done.is_empty() {
            update(connection, self.sql(DONE), json(&done)?).await?;
        }
        if !changes.is_empty() {
            update(connection, self.sql(CHANGE), json(&changes)?).await?;
        }
        Ok(ours)
    }
}

async fn update(
    connection: &mut SqliteConnection,
    sql: AssertSqlSafe<String>,
    rows: String,
) -> Result<(), sqlx::Error> {
    sqlx::query(sql).bind(rows).execute(connection).await.map(|_| ())
}

fn json(rows: &impl Serialize) -> Result<String, sqlx::Error> {
    serde_json::to_string(rows).map_err(|error| sqlx::Error::Encode(error.into()))
}
