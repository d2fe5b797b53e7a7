use std::time::Duration;

use chrono::DateTime;
use posthaste_core::hub_store::{AuditEntry, AuditFilter, AuditPage, AuditPageRequest, LogType};
use sqlx::sqlite::{SqlitePool, SqliteRow};
use sqlx::{QueryBuilder, Row, Sqlite};
use uuid::Uuid;

use super::id_bytes;
use crate::audit::{USUAL_STATUS, index_of, page};
use crate::list::COUNTED;
use crate::outbox::limit;
use crate::unreadable::readable;

const COLUMNS: &str = "id, at, log_type, event_id, event_type, subscription_id, subscriber_id, domain, topic, attempt, \
     status_code, error_code, message, duration_ms";

const TRAIL: &str =
    "SELECT id, at, log_type, event_id, event_type, subscription_id, subscriber_id, domain, topic, attempt,
         status_code, error_code, message, duration_ms
     FROM audit_log INDEXED BY audit_log_event WHERE event_id = ?1 ORDER BY at, id LIMIT ?2";

pub(super) async fn list(
    connections: &SqlitePool,
    filter: &AuditFilter,
    request: &AuditPageRequest,
) -> Result<AuditPage, sqlx::Error> {
    let parts = filter.parts();
    if parts.is_empty() {
        return Ok(page(Vec::new(), 0, 0, request));
    }
    let rows = page_of(&parts, filter, request).build().fetch_all(connections).await?;
    let mut counted = 0;
    for part in parts {
        counted += count(part, filter).build_query_scalar::<i64>().fetch_one(connections).await?;
    }
    Ok(page(readable("audit_log", &rows, 0, read), rows.len(), counted, request))
}

pub(super) async fn trail(
    connections: &SqlitePool,
    event_id: &str,
    max: usize,
) -> Result<Vec<AuditEntry>, sqlx::Error> {
    let rows = sqlx::query(TRAIL).bind(event_id).bind(limit(max)).fetch_all(connections).await?;
    Ok(readable("audit_log", &rows, 0, read))
}

/// One page, and one entry more than requested. Each part of the list is read in the order of its index, only as far as
/// the page needs it.
fn page_of(parts: &[Option<LogType>], filter: &AuditFilter, request: &AuditPageRequest) -> QueryBuilder<Sqlite> {
    let (size, offset) = (i64::from(request.size) + 1, request.offset());
    let mut query = QueryBuilder::new(format!("SELECT {COLUMNS} FROM ("));
    for (place, part) in parts.iter().enumerate() {
        query.push(if place > 0 { " UNION ALL " } else { "" });
        query.push(format!("SELECT * FROM (SELECT {COLUMNS} FROM audit_log"));
        push_conditions(&mut query, *part, filter);
        if let Some(cursor) = &request.cursor {
            query.push(" AND (at, id) < (").push_bind(cursor.at.timestamp_micros());
            query.push(", ").push_bind(id_bytes(&cursor.id)).push(")");
        }
        query.push(" ORDER BY at DESC, id DESC LIMIT ").push_bind(offset.saturating_add(size)).push(")");
    }
    query.push(") ORDER BY at DESC, id DESC LIMIT ").push_bind(size);
    query.push(" OFFSET ").push_bind(offset);
    query
}

fn count(part: Option<LogType>, filter: &AuditFilter) -> QueryBuilder<Sqlite> {
    let mut query = QueryBuilder::new("SELECT count(*) FROM (SELECT 1 FROM audit_log");
    push_conditions(&mut query, part, filter);
    query.push(" LIMIT ").push_bind(COUNTED + 1).push(")");
    query
}

/// Statements name their index, so that the planner cannot choose one that has other entries, too.
fn push_conditions(query: &mut QueryBuilder<Sqlite>, part: Option<LogType>, filter: &AuditFilter) {
    if let (Some(index), _) = index_of(filter, part) {
        query.push(" INDEXED BY ").push(index);
    }
    query.push(" WHERE true");
    if let Some(event_id) = &filter.event_id {
        query.push(" AND event_id = ").push_bind(event_id.clone());
    }
    if let Some(subscription_id) = &filter.subscription_id {
        query.push(" AND subscription_id = ").push_bind(subscription_id.clone());
    }
    match part {
        Some(log_type) => _ = query.push(" AND log_type = ").push_bind(log_type.code()),
        None if !filter.log_types.is_empty() => {
            query.push(" AND log_type IN (");
            let mut types = query.separated(", ");
            filter.log_types.iter().for_each(|log_type| _ = types.push_bind(log_type.code()));
            query.push(")");
        }
        None => {}
    }
    if let Some(status) = filter.status_code {
        query.push(" AND status_code = ").push_bind(status);
        if status != USUAL_STATUS {
            // The condition of the index.
            query.push(format!(" AND status_code <> {USUAL_STATUS}"));
        }
    }
    if let Some(from) = filter.from {
        query.push(" AND at >= ").push_bind(from.timestamp_micros());
    }
    if let Some(to) = filter.to {
        query.push(" AND at <= ").push_bind(to.timestamp_micros());
    }
}

fn read(row: &SqliteRow) -> Result<AuditEntry, sqlx::Error> {
    let unknown = |what: &str| sqlx::Error::Decode(format!("unknown {what}").into());
    Ok(AuditEntry {
        id: Uuid::from_slice(row.try_get(0)?).map_err(|_| unknown("id"))?.to_string(),
        at: DateTime::from_timestamp_micros(row.try_get(1)?).ok_or_else(|| unknown("time"))?,
        log_type: LogType::of_code(row.try_get(2)?).ok_or_else(|| unknown("log type"))?,
        event_id: row.try_get(3)?,
        event_type: row.try_get(4)?,
        subscription_id: row.try_get(5)?,
        subscriber_id: row.try_get(6)?,
        domain: row.try_get(7)?,
        topic: row.try_get(8)?,
        attempt: row.try_get(9)?,
        status_code: row.try_get(10)?,
        error_code: row.try_get(11)?,
        message: row.try_get(12)?,
        duration: row.try_get::<Option<i64>, _>(13)?.map(|millis| Duration::from_millis(millis.unsigned_abs())),
    })
}

#[cfg(test)]
mod tests {
    use chrono::Utc;
    use posthaste_core::hub_store::AuditCursor;

    use super::*;
    use crate::sqlite::plans::plan_of;

    #[tokio::test]
    async fn lists_read_an_index_in_its_order() {
        let (text, now) = (|| Some("a".to_owned()), Some(Utc::now()));
        let all = AuditFilter::default;
        let cursor = AuditCursor { at: Utc::now(), id: Uuid::nil().to_string() };
        for (filter, index) in [
            (all(), "PRIMARY KEY"),
            (AuditFilter { from: now, to: now, ..all() }, "PRIMARY KEY (at>? AND at<?)"),
            (AuditFilter { event_id: text(), status_code: Some(503), ..all() }, "INDEX audit_log_event (event_id=?"),
            (
                AuditFilter { subscription_id: text(), from: now, ..all() },
                "INDEX audit_log_subscription (subscription_id=? AND log_type=?",
            ),
            (AuditFilter { log_types: vec![LogType::Executed], ..all() }, "INDEX audit_log_type (log_type=?"),
            (AuditFilter { log_types: LogType::DELIVERIES.into(), ..all() }, "INDEX audit_log_type (log_type=?"),
            (AuditFilter { status_code: Some(503), ..all() }, "INDEX audit_log_status (status_code=? AND log_type=?"),
            (AuditFilter { status_code: Some(200), ..all() }, "INDEX audit_log_type (log_type=?"),
        ] {
            let parts = filter.parts();
            for cursor in [None, Some(cursor.clone())] {
                let has_range = cursor.is_some() || filter.from.is_some();
                let request = AuditPageRequest { cursor, ..AuditPageRequest::default() };
                let plan = plan_of(page_of(&parts, &filter, &request).sql().as_str()).await.join("\n");
                assert!(plan.matches(index).count() >= parts.len() || index == "PRIMARY KEY", "{filter:?}: {plan}");
                assert!(
                    !plan.contains("SCAN audit_log") || (!has_range && index == "PRIMARY KEY"),
                    "{filter:?}: {plan}"
                );
                assert!(parts.len() > 1 || !plan.contains("B-TREE"), "{filter:?}: {plan}");
            }
            for part in parts {
                let plan = plan_of(count(part, &filter).sql().as_str()).await.join("\n");
                assert!(plan.contains(index) || index == "PRIMARY KEY", "{filter:?}: {plan}");
            }
        }
        let plan = plan_of(TRAIL).await.join("\n");
        assert!(plan.contains("INDEX audit_log_event (event_id=?)") && !plan.contains("B-TREE"), "{plan}");
    }

    #[tokio::test]
    async fn an_insert_looks_for_a_received_entry_by_its_event() {
        let plan = plan_of(&super::super::insert_rows(2)).await.join("\n");
        assert!(plan.contains("COVERING INDEX audit_log_event (event_id=?)"), "{plan}");
    }
}
