use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, Utc};
use posthaste_core::StoreError;
use posthaste_core::hub_store::{
    DeadLetterCursor, DeadLetterDetail, DeadLetterFields, DeadLetterFilter, DeadLetterHistory, DeadLetterPage,
    DeadLetterQueries, DeadLetterRow, DeadLetterSortKey, DeadLetterStatus, Trigger,
};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, FromRow, Postgres, QueryBuilder, Row};

use super::DeadLetterTable;
use crate::list::{COUNTED, literal};
use crate::postgres::clock::{NOW, span};
use crate::postgres::errors::store_error;
use crate::postgres::log::{READ, in_transaction};
use crate::postgres::texts::{has_nul, storable_text};
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

const HISTORY: &str = "SELECT error_code, error_message, error_cause, process_date, trigger, replay_id, duration_ms,
         id::text
     FROM retry_history WHERE letter_id = $1 ORDER BY id";
const HISTORY_ID: usize = 7;

const DEPTH: &str = "SELECT status, sum(letters)::bigint FROM dlt_depth GROUP BY status ORDER BY status";

/// Begins a transaction for a list whose order no index has: the planner must not choose an index for its order only.
const READ_AND_SORT: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY; SET LOCAL jit = off";

pub(super) fn of_event() -> String {
    format!("SELECT {FIELDS}, {SHOWN} FROM dlt_event WHERE event_id = $1 ORDER BY event_id, created_at, id")
}

pub(super) fn is_due() -> String {
    format!(
        "SELECT EXISTS (SELECT 1 FROM dlt_event
             WHERE due IS NOT NULL AND due <= {NOW} AND (locked_until IS NULL OR locked_until <= {NOW})
             ORDER BY due, id LIMIT 1)"
    )
}

pub(super) fn oldest_due() -> String {
    format!(
        "SELECT (extract(epoch FROM {NOW} - due) * 1000000)::bigint FROM dlt_event
         WHERE due IS NOT NULL AND due <= {NOW} ORDER BY due, id LIMIT 1"
    )
}

#[async_trait]
impl DeadLetterQueries for DeadLetterTable {
    async fn list(&self, filter: &DeadLetterFilter) -> Result<DeadLetterPage, StoreError> {
        const DOING: &str = "list dead letters";
        let texts = [&filter.message_id, &filter.subscriber_id, &filter.domain, &filter.event_type];
        if texts.into_iter().chain([&filter.error, &filter.q]).any(has_nul) {
            // PostgreSQL cannot compare with such a text, and has none.
            return Ok(DeadLetterPage { items: Vec::new(), total: 0, total_is_lower_bound: false, next: None });
        }
        let begin = if index_of(filter).is_some() { READ } else { READ_AND_SORT };
        let rows = in_transaction(self.database.operators(), DOING, begin, page(filter).build()).await?;
        let size = filter.size as usize;
        let has_more = rows.len() > size;
        let items = readable("dlt_event", &rows[..rows.len().min(size)], ID, read);
        let next = items.last().filter(|_| has_more).map(|last| DeadLetterCursor::after(last, filter.sort));
        let counted = in_transaction(self.database.operators(), DOING, READ_AND_SORT, count(filter).build()).await?;
        let counted = counted.first().map_or(Ok(0), |row| row.try_get::<i64, _>(0));
        let counted = counted.map_err(|error| store_error(DOING, error))?;
        let total = counted.min(COUNTED).unsigned_abs();
        Ok(DeadLetterPage { items, total, total_is_lower_bound: counted > COUNTED, next })
    }

    async fn get(&self, id: &str) -> Result<Option<DeadLetterDetail>, StoreError> {
        const DOING: &str = "read a dead letter";
        let id = storable_text(id);
        let sql = format!(
            "SELECT {FIELDS}, {SHOWN}, envelope, readable FROM dlt_event JOIN dlt_payload ON letter_id = id
             WHERE id = $1"
        );
        let rows = self.database.read(DOING, sqlx::query(AssertSqlSafe(sql)).bind(&id)).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let history = self.database.read(DOING, sqlx::query(HISTORY).bind(&id)).await?;
        let history = readable("retry_history", &history, HISTORY_ID, read_history);
        read_detail(row, history).map(Some).map_err(|error| store_error(DOING, error))
    }

    async fn of_event(&self, event_id: &str) -> Result<Vec<DeadLetterRow>, StoreError> {
        let query = sqlx::query(AssertSqlSafe(of_event())).bind(storable_text(event_id));
        let rows = self.database.read("read the dead letters of an event", query).await?;
        Ok(readable("dlt_event", &rows, ID, read))
    }

    async fn is_due(&self) -> Result<bool, StoreError> {
        const DOING: &str = "look for due dead letters";
        let rows = self.database.read(DOING, sqlx::query(AssertSqlSafe(is_due()))).await?;
        rows.first().map_or(Ok(false), |row| row.try_get(0)).map_err(|error| store_error(DOING, error))
    }

    async fn oldest_due(&self) -> Result<Option<Duration>, StoreError> {
        const DOING: &str = "look at the first dead letter";
        let rows = self.database.read(DOING, sqlx::query(AssertSqlSafe(oldest_due()))).await?;
        let age = rows.first().map(|row| row.try_get(0).map(span)).transpose();
        age.map_err(|error| store_error(DOING, error))
    }

    async fn depth_by_status(&self) -> Result<Vec<(DeadLetterStatus, u64)>, StoreError> {
        let rows = self.database.read("count the dead letters", sqlx::query(DEPTH)).await?;
        Ok(readable("dlt_depth", &rows, 0, |row| {
            let (status, count) = <(i16, i64)>::from_row(row)?;
            Ok((DeadLetterStatus::of_code(status.into()), u64::try_from(count).unwrap_or_default()))
        }))
    }
}

/// The columns that the index of a list begins with, before the columns of its order; `None` if no index has the dead
/// letters of the filter in the order of the list.
fn index_of(filter: &DeadLetterFilter) -> Option<&'static [&'static str]> {
    let is_of_subscriber = filter.subscriber_id.is_some();
    match (filter.sort.by, filter.status) {
        (DeadLetterSortKey::CreatedAt, _) if filter.message_id.is_some() => Some(&["event_id"]),
        (DeadLetterSortKey::CreatedAt, Some(_)) if is_of_subscriber => Some(&["subscriber_id", "status"]),
        (DeadLetterSortKey::CreatedAt | DeadLetterSortKey::UpdatedAt, Some(_)) if !is_of_subscriber => {
            Some(&["status"])
        }
        (DeadLetterSortKey::CreatedAt, None) if !is_of_subscriber => Some(&[]),
        _ => None,
    }
}

/// One page, and one dead letter more than requested: if it exists, there is a next page.
///
/// The conditions and the order name the columns of the index as the index does, although the first ones are the same for
/// all of these dead letters. With an equality, any index could give the order. A planner then chooses the index of all
/// dead letters if it believes that every second one is FAILED, although a million others may have come since.
pub(super) fn page(filter: &DeadLetterFilter) -> QueryBuilder<Postgres> {
    let first = index_of(filter).unwrap_or_default();
    let key = [first, &[column_of(filter.sort.by), "id"]].concat().join(", ");
    let mut page = QueryBuilder::new(format!("SELECT {FIELDS}, {SHOWN} FROM dlt_event"));
    push_conditions(&mut page, filter, first);
    for side in [">=", "<="].into_iter().filter(|_| !first.is_empty()) {
        page.push(format!(" AND ({}) {side} (", first.join(", ")));
        push_values(&mut page, filter, first);
        page.push(")");
    }
    if let Some(cursor) = &filter.cursor {
        page.push(format!(" AND ({key}) {} (", if filter.sort.descending { "<" } else { ">" }));
        push_values(&mut page, filter, first);
        page.push(if first.is_empty() { "" } else { ", " });
        match filter.sort.by {
            DeadLetterSortKey::RetryCount => page.push_bind(cursor.key),
            _ => page.push_bind(DateTime::<Utc>::from_timestamp_millis(cursor.key).unwrap_or_default()),
        };
        page.push(", ").push_bind(storable_text(&cursor.id)).push(")");
    }
    let way = if filter.sort.descending { " DESC" } else { "" };
    let order = key.replace(", ", &format!("{way}, "));
    page.push(format!(" ORDER BY {order}{way} LIMIT ")).push_bind(i64::from(filter.size) + 1);
    if filter.cursor.is_none() {
        page.push(" OFFSET ").push_bind(i64::from(filter.page) * i64::from(filter.size));
    }
    page
}

/// The values of the filter for these columns.
fn push_values(query: &mut QueryBuilder<Postgres>, filter: &DeadLetterFilter, columns: &[&str]) {
    for (place, column) in columns.iter().enumerate() {
        query.push(if place > 0 { ", " } else { "" });
        match *column {
            "status" => query.push_bind(filter.status.map(DeadLetterStatus::code)),
            "subscriber_id" => query.push_bind(filter.subscriber_id.clone()),
            _ => query.push_bind(filter.message_id.clone()),
        };
    }
}

pub(super) fn count(filter: &DeadLetterFilter) -> QueryBuilder<Postgres> {
    let mut count = QueryBuilder::new("SELECT count(*) FROM (SELECT 1 FROM dlt_event");
    push_conditions(&mut count, filter, &[]);
    count.push(" LIMIT ").push_bind(COUNTED + 1).push(") AS counted");
    count
}

/// The conditions of the filter, except those on the columns `without`.
fn push_conditions(query: &mut QueryBuilder<Postgres>, filter: &DeadLetterFilter, without: &[&str]) {
    query.push(" WHERE true");
    let equal = [
        ("event_id", &filter.message_id),
        ("subscriber_id", &filter.subscriber_id),
        ("domain", &filter.domain),
        ("event_type", &filter.event_type),
    ];
    for (column, value) in equal.into_iter().filter(|(column, _)| !without.contains(column)) {
        if let Some(value) = value {
            query.push(format!(" AND {column} = ")).push_bind(value.clone());
        }
    }
    if let Some(status) = filter.status.filter(|_| !without.contains(&"status")) {
        query.push(" AND status = ").push_bind(status.code());
    }
    if let Some(from) = filter.from {
        query.push(" AND created_at >= ").push_bind(from);
    }
    if let Some(to) = filter.to {
        query.push(" AND created_at <= ").push_bind(to);
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

fn push_like(query: &mut QueryBuilder<Postgres>, column: &'static str, pattern: String) {
    query.push(column).push(" ILIKE ").push_bind(pattern).push(" ESCAPE '\\'");
}

fn column_of(key: DeadLetterSortKey) -> &'static str {
    match key {
        DeadLetterSortKey::CreatedAt => "created_at",
        DeadLetterSortKey::UpdatedAt => "updated_at",
        DeadLetterSortKey::RetryCount => "retry_count",
    }
}

/// Reads [`FIELDS`], which are the first columns.
pub(super) fn read_fields(row: &PgRow) -> Result<DeadLetterFields, sqlx::Error> {
    Ok(DeadLetterFields {
        delivery_id: row.try_get(0)?,
        event_id: row.try_get(1)?,
        subscription_id: row.try_get(2)?,
        subscriber_id: row.try_get(3)?,
        event_type: row.try_get(4)?,
        domain: row.try_get(5)?,
        endpoint: row.try_get(6)?,
        attempts: row.try_get::<i32, _>(7)?.unsigned_abs(),
        first_failed_at: row.try_get(8)?,
    })
}

/// Reads [`FIELDS`] and [`SHOWN`].
fn read(row: &PgRow) -> Result<DeadLetterRow, sqlx::Error> {
    Ok(DeadLetterRow {
        id: row.try_get(ID)?,
        fields: read_fields(row)?,
        status: DeadLetterStatus::of_code(row.try_get::<i16, _>(ID + 1)?.into()),
        retry_count: row.try_get::<i32, _>(ID + 2)?.unsigned_abs(),
        error: row.try_get(ID + 3)?,
        error_code: row.try_get(ID + 4)?,
        error_cause: row.try_get(ID + 5)?,
        scheduled_at: row.try_get(ID + 6)?,
        replay_id: row.try_get(ID + 7)?,
        created_at: row.try_get(ID + 8)?,
        updated_at: row.try_get(ID + 9)?,
    })
}

fn read_detail(row: &PgRow, history: Vec<DeadLetterHistory>) -> Result<DeadLetterDetail, sqlx::Error> {
    Ok(DeadLetterDetail {
        row: read(row)?,
        envelope: Bytes::from(row.try_get::<Vec<u8>, _>(AFTER_SHOWN)?),
        readable: row.try_get(AFTER_SHOWN + 1)?,
        history,
    })
}

fn read_history(row: &PgRow) -> Result<DeadLetterHistory, sqlx::Error> {
    let trigger = match row.try_get::<&str, _>(4)? {
        "REPLAY" => Trigger::Replay { replay_id: row.try_get::<Option<String>, _>(5)?.unwrap_or_default() },
        _ => Trigger::Scheduled,
    };
    Ok(DeadLetterHistory {
        error_code: row.try_get(0)?,
        error_message: row.try_get(1)?,
        error_cause: row.try_get(2)?,
        process_date: row.try_get(3)?,
        trigger,
        duration: Duration::from_millis(row.try_get::<i64, _>(6)?.max(0).unsigned_abs()),
    })
}
