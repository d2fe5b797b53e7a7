use bytes::Bytes;
use posthaste_core::hub_store::{
    QuarantineCursor, QuarantineFilter, QuarantinePage, QuarantineStatus, QuarantinedRecord, QuarantinedRow,
};
use sqlx::sqlite::{SqlitePool, SqliteRow};
use sqlx::{QueryBuilder, Row, Sqlite};

use crate::list::{COUNTED, SHOWN_KEY, SHOWN_REASON, quarantine_page};
use crate::sqlite::clock::time;
use crate::unreadable::readable;

/// The columns of a row in a list: long texts are cut.
pub(super) fn shown_columns() -> String {
    columns(&format!("substr(key, 1, {SHOWN_KEY})"), &format!("substr(reason, 1, {SHOWN_REASON})"))
}

/// The columns of a whole record.
pub(super) fn all_columns() -> String {
    columns("key", "reason") + ", value, headers"
}

fn columns(key: &str, reason: &str) -> String {
    format!(
        "id, group_name, topic, partition, \"offset\", {key}, length(value), {reason}, status, status_reason,
         replayable, created_at, updated_at"
    )
}
const VALUE: usize = 13;

/// The tables of a record and of its value.
pub(super) const RECORDS: &str = "quarantined_record JOIN quarantined_value ON record_id = id";

/// The index that a list reads. Statements name it, so that the planner cannot choose one that has other records, too.
fn index(filter: &QuarantineFilter) -> &'static str {
    match (&filter.topic, &filter.group) {
        (Some(_), _) => "quarantined_record_list_of_topic",
        (None, Some(_)) => "quarantined_record_list_of_group",
        (None, None) => "quarantined_record_list",
    }
}

/// One status at a time, because an index has the order of the list only within a status.
pub(super) async fn list(
    connections: &SqlitePool,
    filter: &QuarantineFilter,
    after: Option<&QuarantineCursor>,
    limit: u32,
) -> Result<QuarantinePage, sqlx::Error> {
    let (mut items, mut counted) = (Vec::new(), 0);
    for status in filter.statuses() {
        let rows = page(*status, filter, after, limit).build().fetch_all(connections).await?;
        items.extend(readable("quarantined_record", &rows, 0, row));
        counted += count(*status, filter).build_query_scalar::<i64>().fetch_one(connections).await?;
    }
    Ok(quarantine_page(items, counted, limit))
}

fn page(
    status: QuarantineStatus,
    filter: &QuarantineFilter,
    after: Option<&QuarantineCursor>,
    limit: u32,
) -> QueryBuilder<Sqlite> {
    let mut query = QueryBuilder::new(format!(
        "SELECT {} FROM quarantined_record INDEXED BY {} CROSS JOIN quarantined_value ON record_id = id",
        shown_columns(),
        index(filter)
    ));
    push_conditions(&mut query, status, filter);
    if let Some(after) = after {
        query.push(" AND (created_at, id) < (").push_bind(after.created_at.timestamp_millis());
        query.push(", ").push_bind(after.id.clone()).push(")");
    }
    query.push(" ORDER BY created_at DESC, id DESC LIMIT ").push_bind(i64::from(limit) + 1);
    query
}

fn count(status: QuarantineStatus, filter: &QuarantineFilter) -> QueryBuilder<Sqlite> {
    let mut query = QueryBuilder::new(format!(
        "SELECT count(*) FROM (SELECT 1 FROM quarantined_record INDEXED BY {}",
        index(filter)
    ));
    push_conditions(&mut query, status, filter);
    query.push(" LIMIT ").push_bind(COUNTED + 1).push(")");
    query
}

fn push_conditions(query: &mut QueryBuilder<Sqlite>, status: QuarantineStatus, filter: &QuarantineFilter) {
    query.push(" WHERE status = ").push_bind(status.code());
    if let Some(group) = &filter.group {
        query.push(" AND group_name = ").push_bind(group.clone());
    }
    if let Some(topic) = &filter.topic {
        query.push(" AND topic = ").push_bind(topic.clone());
    }
    if let Some(from) = filter.from {
        query.push(" AND created_at >= ").push_bind(from.timestamp_millis());
    }
    if let Some(to) = filter.to {
        query.push(" AND created_at <= ").push_bind(to.timestamp_millis());
    }
}

/// Reads the columns of a row.
pub(super) fn row(row: &SqliteRow) -> Result<QuarantinedRow, sqlx::Error> {
    Ok(QuarantinedRow {
        id: row.try_get(0)?,
        group: row.try_get(1)?,
        topic: row.try_get(2)?,
        partition: row.try_get(3)?,
        offset: row.try_get(4)?,
        key: row.try_get(5)?,
        size: row.try_get::<i64, _>(6)?.unsigned_abs(),
        reason: row.try_get(7)?,
        status: QuarantineStatus::of_code(row.try_get(8)?),
        status_reason: row.try_get(9)?,
        is_replayable: row.try_get(10)?,
        created_at: time(row.try_get(11)?),
        updated_at: time(row.try_get(12)?),
    })
}

/// Reads [`all_columns`].
pub(super) fn record(found: &SqliteRow) -> Result<QuarantinedRecord, sqlx::Error> {
    let headers = found.try_get::<Option<&str>, _>(VALUE + 1)?;
    let headers = headers.map_or(Ok(Vec::new()), serde_json::from_str);
    Ok(QuarantinedRecord {
        row: row(found)?,
        value: Bytes::from(found.try_get::<Vec<u8>, _>(VALUE)?),
        headers: headers.map_err(|error| sqlx::Error::Decode(error.into()))?,
    })
}

#[cfg(test)]
mod tests {
    use chrono::Utc;
    use sqlx::AssertSqlSafe;

    use super::*;
    use crate::sqlite::Database;

    async fn plan(database: &Database, sql: &str) -> String {
        let explain = AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}"));
        let rows = sqlx::query(explain).fetch_all(database.readers()).await.unwrap();
        rows.iter().map(|row| row.get::<String, _>("detail") + "\n").collect()
    }

    #[tokio::test]
    async fn lists_read_an_index_in_its_order() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(&format!("sqlite://{}/test.db", folder.path().display())).await.unwrap();
        database.migrate_hub().await.unwrap();
        let (text, now) = (|| Some("a".to_owned()), Some(Utc::now()));
        let all = QuarantineFilter::default;
        let after = QuarantineCursor { created_at: Utc::now(), id: String::new() };
        for (filter, index) in [
            (all(), "list (status=?"),
            (QuarantineFilter { from: now, to: now, ..all() }, "list (status=?"),
            (QuarantineFilter { group: text(), ..all() }, "list_of_group (status=? AND group_name=?"),
            (QuarantineFilter { topic: text(), from: now, ..all() }, "list_of_topic (status=? AND topic=?"),
            (QuarantineFilter { topic: text(), group: text(), ..all() }, "list_of_topic (status=? AND topic=?"),
        ] {
            for after in [None, Some(&after)] {
                let plan =
                    plan(&database, page(QuarantineStatus::Quarantined, &filter, after, 50).sql().as_str()).await;
                assert!(plan.contains(&format!("INDEX quarantined_record_{index}")), "{filter:?}: {plan}");
                assert!(!plan.contains("SCAN") && !plan.contains("B-TREE"), "{filter:?}: {plan}");
            }
            let plan = plan(&database, count(QuarantineStatus::Quarantined, &filter).sql().as_str()).await;
            assert!(plan.contains(&format!("INDEX quarantined_record_{index}")), "{filter:?}: {plan}");
        }
        database.close().await;
    }
}
