use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::outbox::{DeadFilter, OperatorStore, OutboxRow, Purge};
use sqlx::{Row, SqliteConnection};

use super::OutboxStore;
use super::rows::{EVENT_COLUMNS, row, row_columns};
use crate::outbox::limit;
use crate::sqlite::clock::{millis, millis_of, span};
use crate::sqlite::errors::doing;
use crate::sqlite::json::json;

/// The condition for dead rows. Binds: the event id, the event type, the aggregate type, each of which may be absent.
const FILTER: &str = "status = 3 AND (?1 IS NULL OR event_id = ?1) AND (?2 IS NULL OR event_type = ?2)
     AND (?3 IS NULL OR aggregate_type = ?3)";

/// Binds: the event id.
pub(super) fn find() -> String {
    format!("SELECT {EVENT_COLUMNS}, {} FROM {{table}} WHERE event_id = ?", row_columns())
}

/// Binds: the filter, the limit.
pub(super) fn dead() -> String {
    format!(
        "SELECT {EVENT_COLUMNS}, {} FROM {{table}} INDEXED BY {{table}}_dead WHERE {FILTER} ORDER BY seq LIMIT ?4",
        row_columns()
    )
}

/// Binds: the filter.
pub(super) fn count() -> String {
    format!("SELECT count(*) FROM {{table}} INDEXED BY {{table}}_dead WHERE {FILTER}")
}

/// Counts at the head of the index of pending rows. Binds: the limit.
pub(super) const COUNT_PENDING: &str = "SELECT count(*) FROM (
         SELECT 1 FROM {table} INDEXED BY {table}_pending WHERE status IN (0, 2) ORDER BY due, seq LIMIT ?
     )";

/// Binds: the filter, the row after which to begin, the limit.
pub(super) fn replay() -> String {
    format!(
        "UPDATE {{table}} SET status = 0, attempts = 0, available_at = {{now}}, done_at = NULL, last_error = NULL,
             locked_by = NULL, locked_at = NULL, lease_losses = 0, blocked = 0
         WHERE seq IN (SELECT seq FROM {{table}} INDEXED BY {{table}}_dead
                       WHERE {FILTER} AND seq > ?4 ORDER BY seq LIMIT ?5)
         RETURNING seq"
    )
}

/// Binds: the event id.
const FIND_DEAD: &str = "SELECT seq FROM {table} WHERE event_id = ? AND status = 3";

/// Binds: the rows.
pub(super) const DELETE: &str = "DELETE FROM {table} WHERE seq IN (SELECT value FROM json_each(?))";

/// The old rows in the order of their numbers. Binds: the age in milliseconds, the limit.
///
/// The first young row ends the search, because no row after it can have been finished long ago. So a purge needs no
/// index of its own, and reads little more than it deletes.
pub(super) fn old(purge: Purge) -> String {
    const CUTOFF: &str = "{now_ms} - ?1";
    let created_at = millis_of("created_at");
    let ended_at = format!("coalesce({}, {created_at}, 0)", millis_of("done_at"));
    let old = match purge {
        Purge::Dead => {
            return format!(
                "SELECT seq FROM {{table}} INDEXED BY {{table}}_dead
                 WHERE status = 3 AND {ended_at} < {CUTOFF} ORDER BY seq LIMIT ?2"
            );
        }
        Purge::Done => format!("status = 1 AND {ended_at} < {CUTOFF}"),
        Purge::Everything => format!("coalesce({created_at}, 0) < {CUTOFF}"),
    };
    format!(
        "WITH met (seq, is_young) AS MATERIALIZED (
             SELECT seq, coalesce({created_at}, 0) >= {CUTOFF} AS is_young FROM {{table}}
             WHERE ({old}) OR is_young ORDER BY seq LIMIT ?2
         )
         SELECT seq FROM met WHERE NOT is_young
           AND seq < coalesce((SELECT min(seq) FROM met WHERE is_young), 9223372036854775807)"
    )
}

/// Those of the rows that may still be deleted. Binds: the rows.
pub(super) fn deletable(purge: Purge) -> &'static str {
    match purge {
        Purge::Done => "SELECT seq FROM {table} WHERE seq IN (SELECT value FROM json_each(?)) AND status = 1",
        Purge::Dead => "SELECT seq FROM {table} WHERE seq IN (SELECT value FROM json_each(?)) AND status = 3",
        Purge::Everything => "SELECT seq FROM {table} WHERE seq IN (SELECT value FROM json_each(?))",
    }
}

pub(super) const OLDEST_DUE: &str = "SELECT {now_ms} - due FROM {table} INDEXED BY {table}_pending
     WHERE status IN (0, 2) AND due <= {now_ms} ORDER BY due, seq LIMIT 1";

/// The same, of an ordered table, for rows that wait for no other row.
pub(super) const OLDEST_UNBLOCKED: &str = "SELECT {now_ms} - due FROM {table} INDEXED BY {table}_ready
     WHERE status IN (0, 2) AND blocked = 0 AND due <= {now_ms} ORDER BY due, seq LIMIT 1";

#[async_trait]
impl OperatorStore for OutboxStore {
    async fn find(&self, event_id: &str) -> Result<Option<OutboxRow>, StoreError> {
        let find = async {
            let find = sqlx::query(self.sql(&find())).bind(event_id);
            let found = find.fetch_optional(self.0.database.operators()).await?;
            found.map(|found| row(&found)).transpose()
        };
        doing("find an event in the outbox", find).await
    }

    async fn dead(&self, filter: &DeadFilter, max: usize) -> Result<Vec<OutboxRow>, StoreError> {
        let list = async {
            let list = sqlx::query(self.sql(&dead())).bind(&filter.event_id).bind(&filter.event_type);
            let list = list.bind(&filter.aggregate_type).bind(limit(max));
            let rows = list.fetch_all(self.0.database.operators()).await?;
            rows.iter().map(row).collect()
        };
        doing("list the dead events of the outbox", list).await
    }

    async fn count_dead(&self, filter: &DeadFilter) -> Result<u64, StoreError> {
        let count = async {
            let count = sqlx::query(self.sql(&count())).bind(&filter.event_id).bind(&filter.event_type);
            let row = count.bind(&filter.aggregate_type).fetch_one(self.0.database.operators()).await?;
            Ok(row.try_get::<i64, _>(0)?.max(0) as u64)
        };
        doing("count the dead events of the outbox", count).await
    }

    async fn count_pending(&self, max: usize) -> Result<u64, StoreError> {
        let count = async {
            let count = sqlx::query_scalar(self.sql(COUNT_PENDING)).bind(limit(max));
            let count: i64 = count.fetch_one(self.0.database.operators()).await?;
            Ok(count.max(0) as u64)
        };
        doing("count the pending events of the outbox", count).await
    }

    async fn replay(&self, filter: &DeadFilter, after: i64, max: usize) -> Result<(u64, i64), StoreError> {
        let (store, filter) = (self.clone(), filter.clone());
        let write = self.0.database.write("replay dead events of the outbox", move |connection| {
            let DeadFilter { event_id, event_type, aggregate_type } = filter.clone();
            let replay = sqlx::query(store.sql(&replay())).bind(event_id).bind(event_type).bind(aggregate_type);
            let replay = replay.bind(after).bind(limit(max));
            Box::pin(async move {
                let rows = replay.fetch_all(connection).await?;
                let mut last = after;
                for row in &rows {
                    last = last.max(row.try_get(0)?);
                }
                Ok((rows.len() as u64, last))
            })
        });
        write.await
    }

    async fn discard(&self, event_id: &str) -> Result<bool, StoreError> {
        let (store, event_id) = (self.clone(), event_id.to_owned());
        let write = self.0.database.write("discard a dead event of the outbox", move |connection| {
            let (store, event_id) = (store.clone(), event_id.clone());
            Box::pin(async move {
                let find = sqlx::query_scalar(store.sql(FIND_DEAD)).bind(event_id);
                let found: Vec<i64> = find.fetch_all(&mut *connection).await?;
                store.delete(connection, &found).await?;
                Ok(!found.is_empty())
            })
        });
        write.await
    }

    /// Searches before it writes, so that other writes do not wait for the search, however long it takes.
    async fn purge(&self, which: Purge, older_than: Duration, max: usize) -> Result<u64, StoreError> {
        const DOING: &str = "purge the outbox";
        let old = sqlx::query_scalar(self.sql(&old(which))).bind(millis(older_than)).bind(limit(max));
        let old: Vec<i64> = doing(DOING, old.fetch_all(self.0.database.operators())).await?;
        if old.is_empty() {
            return Ok(0);
        }
        let (database, arguments) = (self.0.database.in_background(), (self.clone(), old));
        let write = database.write_with(DOING, arguments, move |connection, arguments| {
            Box::pin(async move {
                let (store, old) = &*arguments;
                let deletable = sqlx::query_scalar(store.sql(deletable(which))).bind(json(old)?);
                let old: Vec<i64> = deletable.fetch_all(&mut *connection).await?;
                store.delete(connection, &old).await?;
                Ok(old.len() as u64)
            })
        });
        write.await
    }

    async fn oldest_due(&self) -> Result<Option<Duration>, StoreError> {
        self.age_of_first(OLDEST_DUE).await
    }

    async fn oldest_unblocked(&self) -> Result<Option<Duration>, StoreError> {
        self.age_of_first(OLDEST_UNBLOCKED).await
    }

    async fn oldest_due_by_type(&self) -> Result<Vec<(String, Duration)>, StoreError> {
        let look = async { Ok(self.oldest_due_of_types().await?.0) };
        doing("look at the head of the outbox", look).await
    }
}

impl OutboxStore {
    async fn age_of_first(&self, sql: &'static str) -> Result<Option<Duration>, StoreError> {
        let look = async {
            let row = sqlx::query(self.sql(sql)).fetch_optional(self.0.database.operators()).await?;
            row.map(|row| row.try_get(0).map(span)).transpose()
        };
        doing("look at the head of the outbox", look).await
    }

    /// Deletes rows, and unblocks the first rows after them.
    async fn delete(&self, connection: &mut SqliteConnection, rows: &[i64]) -> Result<(), sqlx::Error> {
        if rows.is_empty() {
            return Ok(());
        }
        self.unblock(connection, rows).await?;
        sqlx::query(self.sql(DELETE)).bind(json(rows)?).execute(connection).await.map(|_| ())
    }
}
