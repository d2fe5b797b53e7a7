use std::collections::HashSet;
use std::sync::Arc;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::outbox::{Mode, OutboxStatus, RowUpdate, SettleStore, SettledRows};
use serde::Serialize;
use sqlx::{Row, SqliteConnection};

use super::OutboxStore;
use crate::sqlite::clock::modifier;
use crate::sqlite::errors::store_error;
use crate::sqlite::json::json;

/// The rows that may be updated: pending rows that are still claimed under one of the fencing tokens. The result is one
/// row, a JSON array. Binds: the tokens, the rows.
///
/// No row can match the token of another claim among them: this process settles a row only under its current claim.
pub(super) fn still_claimed(mode: Mode) -> String {
    let is_held = match mode.leases_rows() {
        true => "item.locked_by IN (SELECT value FROM json_each(?1))",
        false => {
            "EXISTS (SELECT 1 FROM {table}_owner
                     WHERE owner || ':' || generation IN (SELECT value FROM json_each(?1)))"
        }
    };
    format!(
        "SELECT json_group_array(item.seq)
         FROM json_each(?2) AS asked CROSS JOIN {{table}} AS item ON item.seq = asked.value
         WHERE item.status NOT IN (1, 3) AND {is_held}"
    )
}

/// Marks rows as DONE, the usual case. Binds: the rows.
pub(super) const MARK_DONE: &str = "UPDATE {table} SET status = 1, done_at = {now}, locked_by = NULL, locked_at = NULL
     WHERE seq IN (SELECT value FROM json_each(?))";

/// An attempt that has ended shows that the row does not crash its process, so a retry resets `lease_losses`. Binds:
/// the updates.
pub(super) const UPDATE: &str = "UPDATE {table} SET
         status = change.status,
         attempts = coalesce(change.attempts, {table}.attempts),
         available_at = coalesce(strftime('%Y-%m-%dT%H:%M:%fZ', 'now', change.wait), available_at),
         done_at = CASE WHEN change.status IN (1, 3) THEN {now} END,
         last_error = coalesce(change.error, last_error),
         locked_by = NULL,
         locked_at = NULL,
         lease_losses = CASE WHEN change.status IN (1, 3) THEN lease_losses ELSE 0 END
     FROM (SELECT value ->> 'seq' AS seq, value ->> 'status' AS status, value ->> 'attempts' AS attempts,
                  value ->> 'wait' AS wait, value ->> 'error' AS error
           FROM json_each(?)) AS change
     WHERE {table}.seq = change.seq";

/// Unblocks the first rows of the keys of these rows, so that claims read them again. Binds: the rows, how many of each
/// key.
pub(super) const UNBLOCK: &str = "UPDATE {table} SET blocked = 0 WHERE seq IN (
         SELECT next.value
         FROM (SELECT DISTINCT aggregate_type, aggregate_id FROM {table}
               WHERE seq IN (SELECT value FROM json_each(?1)) AND aggregate_id IS NOT NULL) AS key
         CROSS JOIN json_each((
             SELECT json_group_array(seq) FROM (
                 SELECT seq, blocked FROM {table} AS item INDEXED BY {table}_key
                 WHERE item.aggregate_type = key.aggregate_type AND item.aggregate_id = key.aggregate_id
                   AND item.{unfinished}
                 ORDER BY seq LIMIT ?2)
             WHERE blocked = 1)) AS next)";

/// An update that is not just DONE, under the names in [`UPDATE`].
#[derive(Serialize)]
struct BoundUpdate<'a> {
    seq: i64,
    status: i16,
    attempts: Option<u32>,
    /// A modifier of the database's time.
    wait: Option<String>,
    error: Option<&'a str>,
}

impl<'a> BoundUpdate<'a> {
    fn of(update: &'a RowUpdate) -> Self {
        Self {
            seq: update.seq,
            status: update.status.code(),
            attempts: update.attempts,
            wait: update.wait.map(modifier),
            error: update.error.as_deref(),
        }
    }
}

#[async_trait]
impl SettleStore for OutboxStore {
    async fn settle(&self, fencing_tokens: &[String], updates: &[RowUpdate]) -> Result<SettledRows, StoreError> {
        const DOING: &str = "settle in the outbox";
        let tokens = json(fencing_tokens).map_err(|error| store_error(DOING, error))?;
        let (store, asked) = (self.clone(), Arc::new((tokens, updates.to_vec())));
        let write = self.0.database.write(DOING, move |connection| {
            let (store, asked) = (store.clone(), asked.clone());
            Box::pin(async move { store.settle_rows(connection, &asked.0, &asked.1).await })
        });
        // One transaction writes at a time: no row is ever locked.
        Ok(SettledRows { applied: write.await?, locked: HashSet::new() })
    }
}

impl OutboxStore {
    async fn settle_rows(
        &self,
        connection: &mut SqliteConnection,
        fencing_tokens: &str,
        updates: &[RowUpdate],
    ) -> Result<HashSet<i64>, sqlx::Error> {
        let rows: Vec<i64> = updates.iter().map(|update| update.seq).collect();
        let held = sqlx::query(self.sql(&still_claimed(self.0.mode))).bind(fencing_tokens).bind(json(&rows)?);
        let held: String = held.fetch_one(&mut *connection).await?.try_get(0)?;
        let held: HashSet<i64> = serde_json::from_str(&held).map_err(|error| sqlx::Error::Decode(error.into()))?;
        let (mut done, mut others, mut finished) = (Vec::new(), Vec::new(), Vec::new());
        for update in updates.iter().filter(|update| held.contains(&update.seq)) {
            match update.status {
                OutboxStatus::Done => done.push(update.seq),
                _ => others.push(BoundUpdate::of(update)),
            }
            if self.0.mode.is_finished(update.status) {
                finished.push(update.seq);
            }
        }
        if !done.is_empty() {
            sqlx::query(self.sql(MARK_DONE)).bind(json(&done)?).execute(&mut *connection).await?;
        }
        if !others.is_empty() {
            sqlx::query(self.sql(UPDATE)).bind(json(&others)?).execute(&mut *connection).await?;
        }
        self.unblock(connection, &finished).await?;
        Ok(held)
    }
}
