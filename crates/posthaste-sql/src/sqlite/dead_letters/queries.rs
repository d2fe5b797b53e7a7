use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{
    DeadLetterCursor, DeadLetterDetail, DeadLetterFields, DeadLetterFilter, DeadLetterHistory, DeadLetterPage,
    DeadLetterQueries, DeadLetterRow, DeadLetterSortKey, DeadLetterStatus, Trigger,
};
use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, QueryBuilder, Row, Sqlite};

use super::DeadLetterTable;
use crate::list::{COUNTED, literal};
use crate::sqlite::clock::{NOW_MS, span, time};
use crate::sqlite::errors::doing;
use crate::unreadable::readable;

/// The columns of [`DeadLetterFields`].
pub(super) const FIELDS: &str = "delivery_id, event_id, subscription_id, subscriber_id, event_type, domain, endpoint, \
     attempts, first_failed_at";
pub(super) const FIELD_COUNT: usize = 9;

/// The columns after [`FIELDS`] in a list.
const SHOWN: &str = "id, status, retry_count, error, error_code, error_cause, scheduled_at, replay_id, created_at, \
     updated_at";
const ID: usize = FIELD_COUNT;
const AFTER_SHOWN: usize = FIELD_COUNT + 10;

const HISTORY: &str = "SELECT error_code, error_message, error_cause, process_date, trigger, replay_id, duration_ms, id
     FROM retry_history WHERE letter_id = ? ORDER BY id";
const HISTORY_ID: usize = 7;

#[async_trait]
impl DeadLetterQueries for DeadLetterTable {
    async fn list(&self, filter: &DeadLetterFilter) -> Result<DeadLetterPage, StoreError> {
        doing("list dead letters", self.read_page(filter)).await
    }

    async fn get(&self, id: &str) -> Result<Option<DeadLetterDetail>, StoreError> {
        doing("read a dead letter", self.read_detail(id)).await
    }

    async fn of_event(&self, event_id: &str) -> Result<Vec<DeadLetterRow>, StoreError> {
        let sql = format!("SELECT {FIELDS}, {SHOWN} FROM dlt_event WHERE event_id = ? ORDER BY created_at, id");
        let query = sqlx::query(AssertSqlSafe(sql)).bind(event_id);
        let rows = doing("read the dead letters of an event", query.fetch_all(self.database.operators())).await?;
        Ok(readable("dlt_event", &rows, ID, read))
    }

    async fn is_due(&self) -> Result<bool, StoreError> {
        let sql = format!(
            "SELECT EXISTS (SELECT 1 FROM dlt_event
                 WHERE due <= {NOW_MS} AND (locked_until IS NULL OR locked_until <= {NOW_MS}))"
        );
        let query = sqlx::query_scalar(AssertSqlSafe(sql));
        doing("look for due dead letters", query.fetch_one(self.database.operators())).await
    }

    async fn oldest_due(&self) -> Result<Option<Duration>, StoreError> {
        let sql = format!(
            "SELECT {NOW_MS} - due FROM dlt_event WHERE due IS NOT NULL AND due <= {NOW_MS} ORDER BY due, id LIMIT 1"
        );
        let query = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_optional(self.database.operators());
        Ok(doing("look at the first dead letter", query).await?.map(span))
    }

    async fn depth_by_status(&self) -> Result<Vec<(DeadLetterStatus, u64)>, StoreError> {
        let query = sqlx::query_as("SELECT status, letters FROM dlt_depth ORDER BY status");
        let rows: Vec<(i64, i64)> = doing("count the dead letters", query.fetch_all(self.database.operators())).await?;
        Ok(rows.into_iter().map(|(status, count)| (DeadLetterStatus::of_code(status), count as u64)).collect())
    }
}

impl DeadLetterTable {
    async fn read_page(&self, filter: &DeadLetterFilter) -> Result<DeadLetterPage, sqlx::Error> {
        let mut page = QueryBuilder::<Sqlite>::new(format!("SELECT {FIELDS}, {SHOWN} FROM dlt_event"));
        push_conditions(&mut page, filter);
        if let Some(cursor) = &filter.cursor {
            let column = column_of(filter.sort.by);
            let side = if filter.sort.descending { "<" } else { ">" };
            page.push(format!(" AND ({column}, id) {side} (")).push_bind(cursor.key);
            page.push(", ").push_bind(cursor.id.clone()).push(")");
        }
        // Reads one row more than requested: if it exists, there is a next page.
        page.push(order(filter)).push(" LIMIT ").push_bind(i64::from(filter.size) + 1);
        if filter.cursor.is_none() {
            page.push(" OFFSET ").push_bind(i64::from(filter.page) * i64::from(filter.size));
        }
        let rows = page.build().fetch_all(self.database.operators()).await?;
        let size = filter.size as usize;
        let has_more = rows.len() > size;
        let items = readable("dlt_event", &rows[..rows.len().min(size)], ID, read);
        let next = items.last().filter(|_| has_more).map(|last| DeadLetterCursor::after(last, filter.sort));

        let mut count = QueryBuilder::<Sqlite>::new("SELECT count(*) FROM (SELECT 1 FROM dlt_event");
        push_conditions(&mut count, filter);
        count.push(" LIMIT ").push_bind(COUNTED + 1).push(")");
        let counted: i64 = count.build_query_scalar().fetch_one(self.database.operators()).await?;
        let total = counted.min(COUNTED) as u64;
        Ok(DeadLetterPage { items, total, total_is_lower_bound: counted > COUNTED, next })
    }

    async fn read_detail(&self, id: &str) -> Result<Option<DeadLetterDetail>, sqlx::Error> {
        let sql = format!(
            "SELECT {FIELDS}, {SHOWN}, envelope, readable FROM dlt_event JOIN dlt_payload ON letter_id = id
             WHERE id = ?"
        );
        let row = sqlx::query(AssertSqlSafe(sql)).bind(id).fetch_optional(self.database.operators()).await?;
        let Some(row) = row else { return Ok(None) };
        let history = sqlx::query(HISTORY).bind(id).fetch_all(self.database.operators()).await?;
        Ok(Some(DeadLetterDetail {
            row: read(&row)?,
            envelope: Bytes::from(row.try_get::<Vec<u8>, _>(AFTER_SHOWN)?),
            readable: row.try_get(AFTER_SHOWN + 1)?,
            history: readable("retry_history", &history, HISTORY_ID, read_history),
        }))
    }
}

fn push_conditions(query: &mut QueryBuilder<Sqlite>, filter: &DeadLetterFilter) {
    query.push(" WHERE true");
    let equal = [
        (" AND event_id = ", &filter.message_id),
        (" AND subscriber_id = ", &filter.subscriber_id),
        (" AND domain = ", &filter.domain),
        (" AND event_type = ", &filter.event_type),
    ];
    for (condition, value) in equal {
        if let Some(value) = value {
            query.push(condition).push_bind(value.clone());
        }
    }
    if let Some(status) = filter.status {
        query.push(" AND status = ").push_bind(status.code());
    }
    if let Some(from) = filter.from {
        query.push(" AND created_at >= ").push_bind(from.timestamp_millis());
    }
    if let Some(to) = filter.to {
        query.push(" AND created_at <= ").push_bind(to.timestamp_millis());
    }
    if let Some(part) = &filter.error {
        push_like(query, " AND error", format!("%{}%", literal(part)));
    }
    if let Some(q) = &filter.q {
        let (beginning, part) = (format!("{}%", literal(q)), format!("%{}%", literal(q)));
        push_like(query, " AND (event_id", beginning.clone());
        push_like(query, " OR subscriber_id", beginning);
        push_like(query, " OR error", part.clone());
        if filter.searches_payloads() {
            query.push(" OR EXISTS (SELECT 1 FROM dlt_payload WHERE letter_id = dlt_event.id");
            push_like(query, " AND readable", part);
            query.push(")");
        }
        query.push(")");
    }
}

fn push_like(query: &mut QueryBuilder<Sqlite>, column: &'static str, pattern: String) {
    query.push(column).push(" LIKE ").push_bind(pattern).push(" ESCAPE '\\'");
}

fn column_of(key: DeadLetterSortKey) -> &'static str {
    match key {
        DeadLetterSortKey::CreatedAt => "created_at",
        DeadLetterSortKey::UpdatedAt => "updated_at",
        DeadLetterSortKey::RetryCount => "retry_count",
    }
}

fn order(filter: &DeadLetterFilter) -> String {
    let (column, way) = (column_of(filter.sort.by), if filter.sort.descending { " DESC" } else { "" });
    format!(" ORDER BY {column}{way}, id{way}")
}

/// Reads [`FIELDS`], which are the first columns.
pub(super) fn read_fields(row: &SqliteRow) -> Result<DeadLetterFields, sqlx::Error> {
    Ok(DeadLetterFields {
        delivery_id: row.try_get(0)?,
        event_id: row.try_get(1)?,
        subscription_id: row.try_get(2)?,
        subscriber_id: row.try_get(3)?,
        event_type: row.try_get(4)?,
        domain: row.try_get(5)?,
        endpoint: row.try_get(6)?,
        attempts: row.try_get(7)?,
        first_failed_at: time(row.try_get(8)?),
    })
}

/// Reads [`FIELDS`] and [`SHOWN`].
fn read(row: &SqliteRow) -> Result<DeadLetterRow, sqlx::Error> {
    Ok(DeadLetterRow {
        id: row.try_get(ID)?,
        fields: read_fields(row)?,
        status: DeadLetterStatus::of_code(row.try_get(ID + 1)?),
        retry_count: row.try_get(ID + 2)?,
        error: row.try_get(ID + 3)?,
        error_code: row.try_get(ID + 4)?,
        error_cause: row.try_get(ID + 5)?,
        scheduled_at: row.try_get::<Option<i64>, _>(ID + 6)?.map(time),
        replay_id: row.try_get(ID + 7)?,
        created_at: time(row.try_get(ID + 8)?),
        updated_at: time(row.try_get(ID + 9)?),
    })
}

fn read_history(row: &SqliteRow) -> Result<DeadLetterHistory, sqlx::Error> {
    let trigger = match row.try_get::<&str, _>(4)? {
        "REPLAY" => Trigger::Replay { replay_id: row.try_get::<Option<String>, _>(5)?.unwrap_or_default() },
        _ => Trigger::Scheduled,
    };
    Ok(DeadLetterHistory {
        error_code: row.try_get(0)?,
        error_message: row.try_get(1)?,
        error_cause: row.try_get(2)?,
        process_date: time(row.try_get(3)?),
        trigger,
        duration: span(row.try_get(6)?),
    })
}
