use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::outbox::{DeadFilter, Mode, OperatorStore, OutboxRow, Purge};
use sqlx::mysql::MySqlArguments;
use sqlx::query::Query;
use sqlx::{MySql, Row};

use super::rows::{EVENT_COLUMNS, ROW_COLUMNS, row};
use super::{OutboxStore, list};
use crate::mysql::clock::{micros, span};
use crate::mysql::errors::doing;
use crate::outbox::limit;

/// The condition for dead rows. Binds: those of the event id, the event type and the aggregate type that the filter
/// has.
fn filter(filter: &DeadFilter) -> String {
    let mut which = "dead = 1".to_owned();
    for (column, is_there) in [
        ("event_id", filter.event_id.is_some()),
        ("event_type", filter.event_type.is_some()),
        ("aggregate_type", filter.aggregate_type.is_some()),
    ] {
        if is_there {
            which.push_str(&format!(" AND {column} = ?"));
        }
    }
    which
}

/// Binds: the event id.
fn find() -> String {
    format!("SELECT {EVENT_COLUMNS}, {ROW_COLUMNS} FROM {{table}} WHERE event_id = ?")
}

/// Binds: the filter, the limit.
pub(super) fn dead(which: &DeadFilter) -> String {
    format!("SELECT {EVENT_COLUMNS}, {ROW_COLUMNS} FROM {{table}} WHERE {} ORDER BY seq LIMIT ?", filter(which))
}

/// Binds: the filter.
fn count(which: &DeadFilter) -> String {
    format!("SELECT COUNT(*) FROM {{table}} WHERE {}", filter(which))
}

/// Counts at the head of the index of pending rows. Binds: the limit.
pub(super) const COUNT_PENDING: &str = "SELECT COUNT(*) FROM (
         SELECT 1 FROM {table} WHERE pending = 1 ORDER BY available_at, seq LIMIT ?
     ) AS head";

/// Binds: the filter, the row after which to begin, the limit.
pub(super) fn replayable(which: &DeadFilter) -> String {
    format!("SELECT seq FROM {{table}} WHERE {} AND seq > ? ORDER BY seq LIMIT ?", filter(which))
}

/// Binds: the rows.
const REPLAY: &str =
    "UPDATE {rows} SET status = 0, attempts = 0, available_at = {now}, done_at = NULL, last_error = NULL,
         locked_by = NULL, locked_at = NULL, lease_losses = 0, blocked = 0
     WHERE dead = 1";

/// Binds: the event id.
const DISCARDABLE: &str = "SELECT seq FROM {table} WHERE event_id = ? AND dead = 1";

/// Finds old and young rows in the order of their numbers, and returns true for the young ones. Binds: the age in
/// microseconds three times, the limit.
///
/// The first young row ends the search, because no row after it can have been finished long ago. So a purge needs no
/// index of its own, and reads little more than it deletes.
pub(super) fn purgeable(purge: Purge) -> String {
    const CUTOFF: &str = "{now} - INTERVAL ? MICROSECOND";
    let (index, which) = match purge {
        Purge::Done => ("PRIMARY", format!("(status = 1 AND COALESCE(done_at, created_at) < {CUTOFF} OR")),
        Purge::Dead => ("{table}_dead", format!("dead = 1 AND (COALESCE(done_at, created_at) < {CUTOFF} OR")),
        Purge::Everything => ("PRIMARY", format!("(created_at < {CUTOFF} OR")),
    };
    format!(
        "SELECT seq, created_at >= {CUTOFF} FROM {{table}} FORCE INDEX ({index})
         WHERE {which} created_at >= {CUTOFF}) ORDER BY seq LIMIT ?"
    )
}

/// Locks those of the rows that may still be deleted, and skips rows that another transaction has locked. Binds: the
/// rows.
fn deletable(purge: Purge) -> &'static str {
    match purge {
        Purge::Done => "SELECT seq FROM {rows} WHERE status = 1 FOR UPDATE SKIP LOCKED",
        Purge::Dead => "SELECT seq FROM {rows} WHERE dead = 1 FOR UPDATE SKIP LOCKED",
        Purge::Everything => "SELECT seq FROM {rows} FOR UPDATE SKIP LOCKED",
    }
}

/// Locks one dead row. Binds: the row.
const LOCK_DEAD: &str = "SELECT seq FROM {rows} WHERE dead = 1 FOR UPDATE";

/// Binds: the rows.
const DELETE: &str = "DELETE {table} FROM {rows}";

const OLDEST_DUE: &str = "SELECT TIMESTAMPDIFF(MICROSECOND, available_at, {now})
     FROM {table} FORCE INDEX ({table}_pending)
     WHERE pending = 1 AND available_at <= {now} ORDER BY available_at, seq LIMIT 1";

/// The same, of an ordered table, for rows that wait for no other row.
pub(super) const OLDEST_UNBLOCKED: &str = "SELECT TIMESTAMPDIFF(MICROSECOND, available_at, {now})
     FROM {table} FORCE INDEX ({table}_ready)
     WHERE ready = 1 AND available_at <= {now} ORDER BY available_at, seq LIMIT 1";

#[async_trait]
impl OperatorStore for OutboxStore {
    async fn find(&self, event_id: &str) -> Result<Option<OutboxRow>, StoreError> {
        let find = async {
            let mut connection = self.connection().await?;
            let found = sqlx::query(self.sql(&find())).bind(event_id).fetch_optional(&mut *connection).await?;
            connection.finish();
            Ok(found.map(|found| row(&found)).transpose()?)
        };
        doing("find an event in the outbox", find).await
    }

    async fn dead(&self, filter: &DeadFilter, max: usize) -> Result<Vec<OutboxRow>, StoreError> {
        let list = async {
            let list = bind_filter(sqlx::query(self.sql(&dead(filter))), filter).bind(limit(max));
            let mut connection = self.connection().await?;
            let rows = list.fetch_all(&mut *connection).await?;
            connection.finish();
            Ok(rows.iter().map(row).collect::<Result<_, _>>()?)
        };
        doing("list the dead events of the outbox", list).await
    }

    async fn count_dead(&self, filter: &DeadFilter) -> Result<u64, StoreError> {
        let count = async {
            let mut connection = self.connection().await?;
            let row = bind_filter(sqlx::query(self.sql(&count(filter))), filter).fetch_one(&mut *connection).await?;
            connection.finish();
            Ok(row.try_get::<i64, _>(0)?.max(0) as u64)
        };
        doing("count the dead events of the outbox", count).await
    }

    async fn count_pending(&self, max: usize) -> Result<u64, StoreError> {
        let count = async {
            let mut connection = self.connection().await?;
            let count = sqlx::query_scalar(self.sql(COUNT_PENDING)).bind(limit(max));
            let count: i64 = count.fetch_one(&mut *connection).await?;
            connection.finish();
            Ok(count.max(0) as u64)
        };
        doing("count the pending events of the outbox", count).await
    }

    async fn replay(&self, filter: &DeadFilter, after: i64, max: usize) -> Result<(u64, i64), StoreError> {
        let replay = async {
            let mut transaction = self.transaction().await?;
            let mut after = after;
            loop {
                let replayable = bind_filter(sqlx::query(self.sql(&replayable(filter))), filter);
                let rows = replayable.bind(after).bind(limit(max)).fetch_all(&mut *transaction).await?;
                let rows = rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<i64>, _>>()?;
                let Some(last) = rows.last() else {
                    transaction.commit().await?;
                    return Ok((0, after));
                };
                after = *last;
                let replay = sqlx::query(self.sql(REPLAY)).bind(list(&rows)).execute(&mut *transaction).await?;
                // If another operator has replayed all of them meanwhile, there may still be others.
                if replay.rows_affected() > 0 {
                    transaction.commit().await?;
                    return Ok((replay.rows_affected(), after));
                }
            }
        };
        doing("replay dead events of the outbox", replay).await
    }

    async fn discard(&self, event_id: &str) -> Result<bool, StoreError> {
        let discard = async {
            let mut transaction = self.transaction().await?;
            let dead = sqlx::query_scalar(self.sql(DISCARDABLE)).bind(event_id).fetch_optional(&mut *transaction);
            let dead: Vec<i64> = dead.await?.into_iter().collect();
            let locked = sqlx::query_scalar(self.sql(LOCK_DEAD)).bind(list(&dead)).fetch_all(&mut *transaction).await?;
            self.delete(&mut transaction, &locked, true).await?;
            transaction.commit().await?;
            Ok(!locked.is_empty())
        };
        doing("discard a dead event of the outbox", discard).await
    }

    async fn purge(&self, which: Purge, older_than: Duration, max: usize) -> Result<u64, StoreError> {
        let purge = async {
            let mut transaction = self.transaction().await?;
            let age = micros(older_than);
            let purgeable = sqlx::query(self.sql(&purgeable(which))).bind(age).bind(age).bind(age).bind(limit(max));
            let mut old: Vec<i64> = Vec::new();
            for row in purgeable.fetch_all(&mut *transaction).await? {
                if row.try_get(1)? {
                    break;
                }
                old.push(row.try_get(0)?);
            }
            let locked = sqlx::query_scalar(self.sql(deletable(which))).bind(list(&old)).fetch_all(&mut *transaction);
            let locked = locked.await?;
            self.delete(&mut transaction, &locked, which != Purge::Done).await?;
            transaction.commit().await?;
            Ok(locked.len() as u64)
        };
        doing("purge the outbox", purge).await
    }

    async fn oldest_due(&self) -> Result<Option<Duration>, StoreError> {
        self.age_of_first(OLDEST_DUE).await
    }

    async fn oldest_unblocked(&self) -> Result<Option<Duration>, StoreError> {
        self.age_of_first(OLDEST_UNBLOCKED).await
    }

    async fn oldest_due_by_type(&self) -> Result<Vec<(String, Duration)>, StoreError> {
        let look = async {
            let mut transaction = self.transaction().await?;
            let types = self.oldest_due_of_types(&mut transaction).await?;
            transaction.commit().await?;
            Ok(types)
        };
        doing("look at the head of the outbox", look).await
    }
}

impl OutboxStore {
    async fn age_of_first(&self, sql: &'static str) -> Result<Option<Duration>, StoreError> {
        let look = async {
            let mut connection = self.connection().await?;
            let row = sqlx::query(self.sql(sql)).fetch_optional(&mut *connection).await?;
            connection.finish();
            Ok(row.map(|row| row.try_get(0).map(span)).transpose()?)
        };
        doing("look at the head of the outbox", look).await
    }

    /// Deletes rows that this transaction has locked.
    async fn delete(
        &self,
        transaction: &mut sqlx::MySqlConnection,
        rows: &[i64],
        blocked_others: bool,
    ) -> Result<(), sqlx::Error> {
        if rows.is_empty() {
            return Ok(());
        }
        if matches!(self.mode, Mode::Ordered(_)) && blocked_others {
            self.unblock_behind(transaction, rows).await?;
        }
        sqlx::query(self.sql(DELETE)).bind(list(rows)).execute(transaction).await.map(|_| ())
    }
}

/// The binds of [`filter`].
fn bind_filter<'q>(
    mut query: Query<'q, MySql, MySqlArguments>,
    filter: &'q DeadFilter,
) -> Query<'q, MySql, MySqlArguments> {
    for text in [&filter.event_id, &filter.event_type, &filter.aggregate_type].into_iter().flatten() {
        query = query.bind(text);
    }
    query
}
