use std::time::Duration;

use posthaste_core::StoreError;
use posthaste_core::hub_store::{AuditEntry, AuditFilter, AuditPage, AuditPageRequest, LogType};
use sqlx::postgres::PgRow;
use sqlx::{Postgres, QueryBuilder, Row};

use crate::audit::{USUAL_STATUS, index_of, page};
use crate::list::COUNTED;
use crate::outbox::limit;
use crate::postgres::database::Database;
use crate::postgres::errors::store_error;
use crate::postgres::texts::{has_nul, storable_text};
use crate::unreadable::readable;

const COLUMNS: &str = "id, at, log_type, event_id, event_type, subscription_id, subscriber_id, domain, topic, attempt, \
     status_code, error_code, message, duration_ms";

pub(super) const TRAIL: &str = "SELECT id::text, at, log_type, event_id, event_type, subscription_id, subscriber_id,
         domain, topic, attempt, status_code, error_code, message, duration_ms
     FROM audit_log WHERE event_id = $1 ORDER BY event_id, audit_log.at, audit_log.id LIMIT $2";

pub(super) async fn list(
    database: &Database,
    filter: &AuditFilter,
    request: &AuditPageRequest,
) -> Result<AuditPage, StoreError> {
    const DOING: &str = "list the audit log";
    // PostgreSQL cannot compare with such a text, and has none.
    let is_empty = has_nul(&filter.event_id) || has_nul(&filter.subscription_id);
    let parts = if is_empty { Vec::new() } else { filter.parts() };
    if parts.is_empty() {
        return Ok(page(Vec::new(), 0, 0, request));
    }
    let rows = database.read(DOING, page_of(&parts, filter, request).build()).await?;
    let mut counted = 0;
    for part in parts {
        let count = database.read(DOING, count(part, filter).build()).await?;
        let count = count.first().map_or(Ok(0), |row| row.try_get::<i64, _>(0));
        counted += count.map_err(|error| store_error(DOING, error))?;
    }
    Ok(page(readable("audit_log", &rows, 0, read), rows.len(), counted, request))
}

pub(super) async fn trail(database: &Database, event_id: &str, max: usize) -> Result<Vec<AuditEntry>, StoreError> {
    let query = sqlx::query(TRAIL).bind(storable_text(event_id)).bind(limit(max));
    let rows = database.read("read the audit trail of an event", query).await?;
    Ok(readable("audit_log", &rows, 0, read))
}

/// One page, and one entry more than requested. Each part of the list is read in the order of its index, only as far as
/// the page needs it.
///
/// The conditions and the order name the columns of the index as the index does, although the first ones are the same for
/// all entries of the part: with an equality, any index could give the order, and the planner may choose one that has
/// millions of other entries.
pub(super) fn page_of(
    parts: &[Option<LogType>],
    filter: &AuditFilter,
    request: &AuditPageRequest,
) -> QueryBuilder<Postgres> {
    let (size, offset) = (i64::from(request.size) + 1, request.offset());
    let columns = COLUMNS.replacen("id", "id::text", 1);
    let mut query = QueryBuilder::new(format!("SELECT {columns} FROM ("));
    for (place, part) in parts.iter().enumerate() {
        query.push(if place > 0 { " UNION ALL " } else { "" });
        query.push(format!("SELECT * FROM (SELECT {COLUMNS} FROM audit_log"));
        let (_, first) = index_of(filter, *part);
        push_conditions(&mut query, *part, filter, first);
        let key = [first, &["at", "id"]].concat();
        if let Some(cursor) = &request.cursor {
            query.push(format!(" AND ({}) < (", key.join(", ")));
            push_values(&mut query, *part, filter, first);
            query.push(if first.is_empty() { "" } else { ", " });
            query.push_bind(cursor.at).push(", ").push_bind(cursor.id.clone()).push("::uuid)");
        }
        query.push(format!(" ORDER BY {} DESC LIMIT ", key.join(" DESC, ")));
        query.push_bind(offset.saturating_add(size)).push(format!(") AS part_{place}"));
    }
    query.push(") AS parts ORDER BY parts.at DESC, parts.id DESC LIMIT ").push_bind(size);
    query.push(" OFFSET ").push_bind(offset);
    query
}

pub(super) fn count(part: Option<LogType>, filter: &AuditFilter) -> QueryBuilder<Postgres> {
    let mut query = QueryBuilder::new("SELECT count(*) FROM (SELECT 1 FROM audit_log");
    push_conditions(&mut query, part, filter, index_of(filter, part).1);
    query.push(" LIMIT ").push_bind(COUNTED + 1).push(") AS counted");
    query
}

/// The conditions of the filter. Those on the columns `first` are ranges of one value.
fn push_conditions(query: &mut QueryBuilder<Postgres>, part: Option<LogType>, filter: &AuditFilter, first: &[&str]) {
    query.push(" WHERE true");
    for side in [">=", "<="].into_iter().filter(|_| !first.is_empty()) {
        query.push(format!(" AND ({}) {side} (", first.join(", ")));
        push_values(query, part, filter, first);
        query.push(")");
    }
    if first.contains(&"subscription_id") {
        // The condition of the index, which a comparison of rows does not imply.
        query.push(" AND subscription_id IS NOT NULL");
    }
    let rest = |column: &str| !first.contains(&column);
    if let Some(event_id) = filter.event_id.as_ref().filter(|_| rest("event_id")) {
        query.push(" AND event_id = ").push_bind(event_id.clone());
    }
    if let Some(subscription_id) = filter.subscription_id.as_ref().filter(|_| rest("subscription_id")) {
        query.push(" AND subscription_id = ").push_bind(subscription_id.clone());
    }
    if rest("log_type") && !filter.log_types.is_empty() {
        let types: Vec<i16> = filter.log_types.iter().map(|log_type| log_type.code()).collect();
        query.push(" AND log_type = ANY (").push_bind(types).push(")");
    }
    if let Some(status) = filter.status_code {
        if rest("status_code") {
            query.push(" AND status_code = ").push_bind(i32::from(status));
        } else {
            // The condition of the index.
            query.push(format!(" AND status_code <> {USUAL_STATUS}"));
        }
    }
    if let Some(from) = filter.from {
        query.push(" AND at >= ").push_bind(from);
    }
    if let Some(to) = filter.to {
        query.push(" AND at <= ").push_bind(to);
    }
}

/// The values of these columns in a part of the list.
fn push_values(query: &mut QueryBuilder<Postgres>, part: Option<LogType>, filter: &AuditFilter, columns: &[&str]) {
    for (place, column) in columns.iter().enumerate() {
        query.push(if place > 0 { ", " } else { "" });
        match *column {
            "log_type" => query.push_bind(part.map(LogType::code)),
            "status_code" => query.push_bind(filter.status_code.map(i32::from)),
            "subscription_id" => query.push_bind(filter.subscription_id.clone()),
            _ => query.push_bind(filter.event_id.clone()),
        };
    }
}

fn read(row: &PgRow) -> Result<AuditEntry, sqlx::Error> {
    let unsigned = |number: Option<i32>| number.map(i32::unsigned_abs);
    let unknown = || sqlx::Error::Decode("unknown log type".into());
    Ok(AuditEntry {
        id: row.try_get(0)?,
        at: row.try_get(1)?,
        log_type: LogType::of_code(row.try_get(2)?).ok_or_else(unknown)?,
        event_id: row.try_get(3)?,
        event_type: row.try_get(4)?,
        subscription_id: row.try_get(5)?,
        subscriber_id: row.try_get(6)?,
        domain: row.try_get(7)?,
        topic: row.try_get(8)?,
        attempt: unsigned(row.try_get(9)?),
        status_code: unsigned(row.try_get(10)?).and_then(|status| u16::try_from(status).ok()),
        error_code: row.try_get(11)?,
        message: row.try_get(12)?,
        duration: row.try_get::<Option<i64>, _>(13)?.map(|millis| Duration::from_millis(millis.unsigned_abs())),
    })
}
