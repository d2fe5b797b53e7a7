use bytes::Bytes;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{
    QuarantineCursor, QuarantineFilter, QuarantinePage, QuarantineStatus, QuarantinedRecord, QuarantinedRow,
};
use sqlx::postgres::PgRow;
use sqlx::{Postgres, QueryBuilder, Row};

use super::super::{LogTables, READ};
use crate::list::{COUNTED, SHOWN_KEY, SHOWN_REASON, quarantine_page};
use crate::postgres::errors::store_error;
use crate::postgres::texts::has_nul;
use crate::unreadable::readable;

/// The columns of a row in a list: long texts are cut.
pub(super) fn shown_columns() -> String {
    columns(&format!("left(key, {SHOWN_KEY})"), &format!("left(reason, {SHOWN_REASON})"))
}

/// The columns of a whole record.
pub(super) fn all_columns() -> String {
    columns("key", "reason") + ", value, headers"
}

fn columns(key: &str, reason: &str) -> String {
    format!(
        "id, group_name, topic, partition, \"offset\", {key}, octet_length(value), {reason}, status, status_reason,
         replayable, created_at, updated_at"
    )
}
const VALUE: usize = 13;

/// One status at a time, because an index has the order of the list only within a status.
pub(super) async fn list(
    tables: &LogTables,
    filter: &QuarantineFilter,
    after: Option<&QuarantineCursor>,
    limit: u32,
) -> Result<QuarantinePage, StoreError> {
    const DOING: &str = "list quarantined records";
    let (mut items, mut counted) = (Vec::new(), 0);
    // PostgreSQL cannot compare with such a text, and has none.
    let statuses = if has_nul(&filter.group) || has_nul(&filter.topic) { &[] } else { filter.statuses() };
    for status in statuses {
        let rows = tables.operate(DOING, READ, page(*status, filter, after, limit).build()).await?;
        items.extend(readable("quarantined_record", &rows, 0, row));
        let count = tables.operate(DOING, READ, count(*status, filter).build()).await?;
        let count = count.first().map_or(Ok(0), |row| row.try_get::<i64, _>(0));
        counted += count.map_err(|error| store_error(DOING, error))?;
    }
    Ok(quarantine_page(items, counted, limit))
}

pub(in super::super) fn page(
    status: QuarantineStatus,
    filter: &QuarantineFilter,
    after: Option<&QuarantineCursor>,
    limit: u32,
) -> QueryBuilder<Postgres> {
    let mut query = QueryBuilder::new(format!("SELECT {} FROM quarantined_record", shown_columns()));
    push_conditions(&mut query, status, filter);
    if let Some(after) = after {
        query.push(" AND (created_at, id) < (").push_bind(after.created_at);
        query.push(", ").push_bind(after.id.clone()).push(")");
    }
    query.push(" ORDER BY created_at DESC, id DESC LIMIT ").push_bind(i64::from(limit) + 1);
    query
}

pub(in super::super) fn count(status: QuarantineStatus, filter: &QuarantineFilter) -> QueryBuilder<Postgres> {
    let mut query = QueryBuilder::new("SELECT count(*) FROM (SELECT 1 FROM quarantined_record");
    push_conditions(&mut query, status, filter);
    query.push(" LIMIT ").push_bind(COUNTED + 1).push(") AS counted");
    query
}

fn push_conditions(query: &mut QueryBuilder<Postgres>, status: QuarantineStatus, filter: &QuarantineFilter) {
    query.push(" WHERE status = ").push_bind(status.code());
    if let Some(group) = &filter.group {
        query.push(" AND group_name = ").push_bind(group.clone());
    }
    if let Some(topic) = &filter.topic {
        query.push(" AND topic = ").push_bind(topic.clone());
    }
    if let Some(from) = filter.from {
        query.push(" AND created_at >= ").push_bind(from);
    }
    if let Some(to) = filter.to {
        query.push(" AND created_at <= ").push_bind(to);
    }
}

/// Reads the columns of a row.
pub(super) fn row(row: &PgRow) -> Result<QuarantinedRow, sqlx::Error> {
    Ok(QuarantinedRow {
        id: row.try_get(0)?,
        group: row.try_get(1)?,
        topic: row.try_get(2)?,
        partition: u32::try_from(row.try_get::<i64, _>(3)?).unwrap_or_default(),
        offset: row.try_get(4)?,
        key: row.try_get(5)?,
        size: u64::from(row.try_get::<i32, _>(6)?.unsigned_abs()),
        reason: row.try_get(7)?,
        status: QuarantineStatus::of_code(row.try_get(8)?),
        status_reason: row.try_get(9)?,
        is_replayable: row.try_get(10)?,
        created_at: row.try_get(11)?,
        updated_at: row.try_get(12)?,
    })
}

/// Reads [`all_columns`].
pub(super) fn record(found: &PgRow) -> Result<QuarantinedRecord, sqlx::Error> {
    let headers = found.try_get::<Option<&str>, _>(VALUE + 1)?;
    let headers = headers.map_or(Ok(Vec::new()), serde_json::from_str);
    Ok(QuarantinedRecord {
        row: row(found)?,
        value: Bytes::from(found.try_get::<Vec<u8>, _>(VALUE)?),
        headers: headers.map_err(|error| sqlx::Error::Decode(error.into()))?,
    })
}
