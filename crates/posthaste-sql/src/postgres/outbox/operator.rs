use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::outbox::{DeadFilter, Mode, OperatorStore, OutboxRow, Purge};
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{Postgres, Row};

use super::OutboxStore;
use super::claim::{PENDING_TYPES, SCAN};
use super::rows::{EVENT_COLUMNS, ROW_COLUMNS, row};
use super::settle::{CHANGE, Locked};
use crate::begin::begin;
use crate::outbox::limit;
use crate::postgres::clock::{micros, span};
use crate::postgres::errors::doing;

/// The condition for dead rows. Binds: the event id, the event type, the aggregate type, each of which may be absent.
const FILTER: &str = "status = 3 AND ($1::text IS NULL OR event_id = $1) AND ($2::text IS NULL OR event_type = $2)
     AND ($3::text IS NULL OR aggregate_type = $3)";

/// Binds: the event id.
fn find() -> String {
    format!("SELECT {EVENT_COLUMNS}, {ROW_COLUMNS} FROM {{table}} WHERE event_id = $1")
}

/// Binds: the filter, the limit.
pub(super) fn dead() -> String {
    format!("SELECT {EVENT_COLUMNS}, {ROW_COLUMNS} FROM {{table}} WHERE {FILTER} ORDER BY seq LIMIT $4")
}

/// Binds: the filter.
fn count() -> String {
    format!("SELECT count(*) FROM {{table}} WHERE {FILTER}")
}

/// Counts at the head of the index of pending rows. Binds: the limit.
pub(super) const COUNT_PENDING: &str = "SELECT count(*) FROM (
         SELECT 1 FROM {table} WHERE status IN (0, 2) ORDER BY available_at, seq LIMIT $1
     ) AS pending";

/// Binds: the filter, the row after which to begin, the limit.
fn replay() -> String {
    format!(
        "UPDATE {{table}} SET status = 0, attempts = 0, available_at = {{now}}, done_at = NULL, last_error = NULL,
             locked_by = NULL, locked_at = NULL, lease_losses = 0, blocked = false
         WHERE seq = ANY (ARRAY(
             SELECT seq FROM {{table}} WHERE {FILTER} AND seq > $4 ORDER BY seq LIMIT $5 FOR UPDATE))
         RETURNING seq"
    )
}

/// Binds: the event id.
const DISCARD: &str = "DELETE FROM {table} WHERE event_id = $1 AND status = 3 RETURNING aggregate_type, aggregate_id";

/// Deletes old rows in the order of their numbers. Binds: the age in microseconds, the limit.
///
/// The query also finds young rows. The first young row ends the search, because no row after it can have been finished
/// long ago. So a purge needs no index of its own, and reads little more than it deletes.
pub(super) fn purge(purge: Purge) -> String {
    const CUTOFF: &str = "{now} - $1 * interval '1 microsecond'";
    let (finished, old) = match purge {
        Purge::Done => ("status = 1", format!("(status = 1 AND coalesce(done_at, created_at) < {CUTOFF} OR")),
        Purge::Dead => ("status = 3", format!("status = 3 AND (coalesce(done_at, created_at) < {CUTOFF} OR")),
        Purge::Everything => ("true", format!("(created_at < {CUTOFF} OR")),
    };
    format!(
        "WITH met AS MATERIALIZED (
             SELECT seq, created_at >= {CUTOFF} AS young FROM {{table}}
             WHERE {old} created_at >= {CUTOFF}) ORDER BY seq LIMIT $2
         ), locked AS MATERIALIZED (
             SELECT seq FROM {{table}}
             WHERE {finished} AND seq = ANY (ARRAY(
                 SELECT seq FROM met
                 WHERE NOT young AND seq < coalesce((SELECT min(seq) FROM met WHERE young), 9223372036854775807)))
             FOR UPDATE SKIP LOCKED
         )
         DELETE FROM {{table}} WHERE seq = ANY (ARRAY(SELECT seq FROM locked))
         RETURNING aggregate_type, aggregate_id"
    )
}

pub(super) const OLDEST_DUE: &str = "SELECT (extract(epoch FROM {now} - available_at) * 1000000)::bigint FROM {table}
     WHERE status IN (0, 2) AND available_at <= {now} ORDER BY available_at, seq LIMIT 1";

/// The same, of an ordered table, for rows that wait for no other row.
pub(super) const OLDEST_UNBLOCKED: &str = "SELECT (extract(epoch FROM {now} - available_at) * 1000000)::bigint
     FROM {table} WHERE status IN (0, 2) AND NOT blocked AND available_at <= {now} ORDER BY available_at, seq LIMIT 1";

#[async_trait]
impl OperatorStore for OutboxStore {
    async fn find(&self, event_id: &str) -> Result<Option<OutboxRow>, StoreError> {
        let find = async {
            let found = sqlx::query(self.sql(&find())).bind(event_id).fetch_optional(&self.pool).await?;
            Ok(found.map(|found| row(&found)).transpose()?)
        };
        doing("find an event in the outbox", find).await
    }

    async fn dead(&self, filter: &DeadFilter, max: usize) -> Result<Vec<OutboxRow>, StoreError> {
        let list = async {
            let list = bind_filter(sqlx::query(self.sql(&dead())), filter).bind(limit(max));
            let rows = list.fetch_all(&self.pool).await?;
            Ok(rows.iter().map(row).collect::<Result<_, _>>()?)
        };
        doing("list the dead events of the outbox", list).await
    }

    async fn count_dead(&self, filter: &DeadFilter) -> Result<u64, StoreError> {
        let count = async {
            let row = bind_filter(sqlx::query(self.sql(&count())), filter).fetch_one(&self.pool).await?;
            Ok(row.try_get::<i64, _>(0)?.max(0) as u64)
        };
        doing("count the dead events of the outbox", count).await
    }

    async fn count_pending(&self, max: usize) -> Result<u64, StoreError> {
        let count = async {
            let mut scan = begin(&self.pool, Some(SCAN)).await?;
            let count: i64 = sqlx::query_scalar(self.sql(COUNT_PENDING)).bind(limit(max)).fetch_one(&mut *scan).await?;
            scan.commit().await?;
            Ok(count.max(0) as u64)
        };
        doing("count the pending events of the outbox", count).await
    }

    async fn replay(&self, filter: &DeadFilter, after: i64, max: usize) -> Result<(u64, i64), StoreError> {
        let replay = async {
            let replay = bind_filter(sqlx::query(self.sql(&replay())), filter).bind(after).bind(limit(max));
            let rows = replay.fetch_all(&self.pool).await?;
            let mut last = after;
            for row in &rows {
                last = last.max(row.try_get(0)?);
            }
            Ok((rows.len() as u64, last))
        };
        doing("replay dead events of the outbox", replay).await
    }

    async fn discard(&self, event_id: &str) -> Result<bool, StoreError> {
        let discard = async {
            let mut transaction = begin(&self.pool, Some(CHANGE)).await?;
            let discarded = sqlx::query(self.sql(DISCARD)).bind(event_id).fetch_optional(&mut *transaction).await?;
            if let Some(row) = &discarded {
                self.unblock(&mut transaction, vec![(row.try_get(0)?, row.try_get(1)?)], Locked::Wait).await?;
            }
            transaction.commit().await?;
            Ok(discarded.is_some())
        };
        doing("discard a dead event of the outbox", discard).await
    }

    async fn purge(&self, which: Purge, older_than: Duration, max: usize) -> Result<u64, StoreError> {
        let purge = async {
            let mut transaction = begin(&self.pool, Some(SCAN)).await?;
            let purge = sqlx::query(self.sql(&purge(which))).bind(micros(older_than)).bind(limit(max));
            let rows = purge.fetch_all(&mut *transaction).await?;
            if matches!(self.mode, Mode::Ordered(_)) && which != Purge::Done {
                let keys = rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?)));
                self.unblock(&mut transaction, keys.collect::<Result<_, sqlx::Error>>()?, Locked::Wait).await?;
            }
            transaction.commit().await?;
            Ok(rows.len() as u64)
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
            let mut scan = begin(&self.pool, Some(SCAN)).await?;
            let rows: Vec<(String, i64)> = sqlx::query_as(self.sql(PENDING_TYPES)).fetch_all(&mut *scan).await?;
            scan.commit().await?;
            Ok(rows.into_iter().map(|(event_type, age)| (event_type, span(age))).collect())
        };
        doing("look at the head of the outbox", look).await
    }
}

impl OutboxStore {
    async fn age_of_first(&self, sql: &'static str) -> Result<Option<Duration>, StoreError> {
        let look = async {
            let mut scan = begin(&self.pool, Some(SCAN)).await?;
            let row = sqlx::query(self.sql(sql)).fetch_optional(&mut *scan).await?;
            scan.commit().await?;
            Ok(row.map(|row| row.try_get(0).map(span)).transpose()?)
        };
        doing("look at the head of the outbox", look).await
    }
}

/// The binds of [`FILTER`].
fn bind_filter<'q>(
    query: Query<'q, Postgres, PgArguments>,
    filter: &'q DeadFilter,
) -> Query<'q, Postgres, PgArguments> {
    query.bind(&filter.event_id).bind(&filter.event_type).bind(&filter.aggregate_type)
}
