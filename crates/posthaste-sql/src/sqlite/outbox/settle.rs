use std::collections::HashSet;
use std::sync::Arc;

use posthaste_core::StoreError;
use posthaste_core::outbox::{RowUpdate, SettledRows, DeadHead, Mode, OutboxStatus};
use serde::Serialize;
use sqlx::{Row, SqliteConnection};

use super::{OutboxStore, json};
use crate::sqlite::clock::modifier;
use crate::sqlite::errors::store_error;

/// Which of the rows may be changed: pending ones whose claim still stands. One row, a JSON array. Binds: the fences, the
/// rows.
///
/// That a row could be held by another claim among the fences than its own is excluded by the table of what this process
/// holds, which names each row under its present claim only.
pub(super) fn fence(mode: Mode) -> String {
    let stands = match mode.leases_rows() {
        true => "item.locked_by IN (SELECT value FROM json_each(?1))",
        false => {
            "EXISTS (SELECT 1 FROM {table}_owner
                     WHERE owner || ':' || generation IN (SELECT value FROM json_each(?1)))"
        }
    };
    format!(
        "SELECT json_group_array(item.seq)
         FROM json_each(?2) AS asked CROSS JOIN {{table}} AS item ON item.seq = asked.value
         WHERE item.status NOT IN (1, 3) AND {stands}"
    )
}

/// The usual case. Binds: the rows.
pub(super) const DONE: &str = "UPDATE {table} SET status = 1, done_at = {now}, locked_by = NULL, locked_at = NULL
     WHERE seq IN (SELECT value FROM json_each(?))";

/// An attempt that came to an end clears its row of the suspicion that it ends processes. Binds: the changes.
pub(super) const CHANGE: &str = "UPDATE {table} SET
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

/// Unblocks the first rows of the keys of these rows, so that they are met again. Binds: the rows, how many of each key.
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

/// Anything but delivered, under the names in [`CHANGE`].
#[derive(Serialize)]
struct Recorded<'a> {
    seq: i64,
    status: i16,
    attempts: Option<u32>,
    /// A modifier of the database's time.
    wait: Option<String>,
    error: Option<&'a str>,
}

impl<'a> Recorded<'a> {
    fn of(change: &'a RowUpdate) -> Self {
        Self {
            seq: change.seq,
            status: change.status.code(),
            attempts: change.attempts,
            wait: change.wait.map(modifier),
            error: change.error.as_deref(),
        }
    }
}

impl OutboxStore {
    pub(super) async fn change(&self, fencing_tokens: &[String], changes: &[RowUpdate]) -> Result<SettledRows, StoreError> {
        const DOING: &str = "settle in the outbox";
        let fencing_tokens = json(fencing_tokens).map_err(|error| store_error(DOING, error))?;
        let asked = Arc::new((fencing_tokens, changes.to_vec()));
        let store = self.clone();
        let write = self.0.database.write(DOING, move |connection| {
            let (store, asked) = (store.clone(), asked.clone());
            Box::pin(async move { store.change_rows(connection, &asked.0, &asked.1).await })
        });
        // One transaction writes at a time: no row is ever locked.
        Ok(SettledRows { rows: write.await?, locked: HashSet::new() })
    }

    async fn change_rows(
        &self,
        connection: &mut SqliteConnection,
        fencing_tokens: &str,
        changes: &[RowUpdate],
    ) -> Result<HashSet<i64>, sqlx::Error> {
        let rows: Vec<i64> = changes.iter().map(|change| change.seq).collect();
        let fence = sqlx::query(self.sql(&fence(self.0.mode))).bind(fencing_tokens).bind(json(&rows)?);
        let ours: String = fence.fetch_one(&mut *connection).await?.try_get(0)?;
        let ours: HashSet<i64> = serde_json::from_str(&ours).map_err(|error| sqlx::Error::Decode(error.into()))?;
        let (mut done, mut others, mut passed) = (Vec::new(), Vec::new(), Vec::new());
        for change in changes.iter().filter(|change| ours.contains(&change.seq)) {
            match change.status {
                OutboxStatus::Done => done.push(change.seq),
                _ => others.push(Recorded::of(change)),
            }
            if change.status == OutboxStatus::Dead && self.0.mode == Mode::Ordered(DeadHead::Skip) {
                passed.push(change.seq);
            }
        }
        if !done.is_empty() {
            sqlx::query(self.sql(DONE)).bind(json(&done)?).execute(&mut *connection).await?;
        }
        if !others.is_empty() {
            sqlx::query(self.sql(CHANGE)).bind(json(&others)?).execute(&mut *connection).await?;
        }
        passed.extend(done);
        self.unblock(connection, &passed).await?;
        Ok(ours)
    }
}
