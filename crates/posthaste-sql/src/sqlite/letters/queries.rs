use std::time::Duration;

use bytes::Bytes;
use chrono::TimeDelta;
use posthaste_core::StoreError;
use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, QueryBuilder, Row, Sqlite};

use super::{Letters, NOW_MS, json, span, time};
use crate::letters::{
    HistoryRow, LetterCursor, LetterDetail, LetterFilter, LetterPage, LetterRow, LetterSortKey, LetterStatus, Replay,
    ReplayResult, ReplayResults, Trigger,
};
use crate::sqlite::errors::store_error;
use crate::sqlite::unreadable::readable;

/// How far a list is counted.
const COUNTED: i64 = 10_000;
/// The widest range of time in which payloads are searched: they have no index.
const SEARCHABLE: TimeDelta = TimeDelta::hours(24);

const COLUMNS: &str = "id, delivery_id, event_id, subscription_id, subscriber_id, event_type, domain, endpoint, \
     status, retry_count, attempts, error, error_code, error_cause, first_failed_at, scheduled_at, replay_id, \
     created_at, updated_at";
const AFTER_LETTER: usize = 19;
const AFTER_HISTORY: usize = 7;

impl Letters {
    /// One page of the letters that meet the filter.
    pub async fn list(&self, filter: &LetterFilter) -> Result<LetterPage, StoreError> {
        let failed = |error| store_error("list dead letters", error);
        let operators = self.0.database.operators();
        let mut page = QueryBuilder::<Sqlite>::new(format!("SELECT {COLUMNS} FROM dlt_event"));
        push_conditions(&mut page, filter);
        if let Some(cursor) = &filter.cursor {
            let column = column_of(filter.sort.by);
            let side = if filter.sort.descending { "<" } else { ">" };
            page.push(format!(" AND ({column}, id) {side} (")).push_bind(cursor.key);
            page.push(", ").push_bind(cursor.id.clone()).push(")");
        }
        // One more than asked for: it shows whether there is a next page.
        page.push(order(filter)).push(" LIMIT ").push_bind(i64::from(filter.size) + 1);
        if filter.cursor.is_none() {
            page.push(" OFFSET ").push_bind(i64::from(filter.page) * i64::from(filter.size));
        }
        let rows = page.build().fetch_all(operators).await.map_err(failed)?;
        let size = filter.size as usize;
        let has_more = rows.len() > size;
        let items = readable("dlt_event", &rows[..rows.len().min(size)], 0, read);
        let next = items.last().filter(|_| has_more).map(|last| LetterCursor::behind(last, filter.sort));

        let mut count = QueryBuilder::<Sqlite>::new("SELECT count(*) FROM (SELECT 1 FROM dlt_event");
        push_conditions(&mut count, filter);
        count.push(" LIMIT ").push_bind(COUNTED + 1).push(")");
        let counted: i64 = count.build_query_scalar().fetch_one(operators).await.map_err(failed)?;
        let total = counted.min(COUNTED) as u64;
        Ok(LetterPage { items, total, total_is_lower_bound: counted > COUNTED, next })
    }

    /// One letter with all that is known of it.
    pub async fn get(&self, id: &str) -> Result<Option<LetterDetail>, StoreError> {
        const HISTORY: &str =
            "SELECT error_code, error_message, error_cause, process_date, trigger, replay_id, duration_ms, id
             FROM retry_history WHERE letter_id = ? ORDER BY id";
        let failed = |error| store_error("read a dead letter", error);
        let operators = self.0.database.operators();
        let sql = AssertSqlSafe(format!("SELECT {COLUMNS}, envelope, readable FROM dlt_event WHERE id = ?"));
        let Some(row) = sqlx::query(sql).bind(id).fetch_optional(operators).await.map_err(failed)? else {
            return Ok(None);
        };
        let history = sqlx::query(HISTORY).bind(id).fetch_all(operators).await.map_err(failed)?;
        let detail = || {
            Ok(LetterDetail {
                letter: read(&row)?,
                envelope: Bytes::from(row.try_get::<Vec<u8>, _>(AFTER_LETTER)?),
                readable: row.try_get(AFTER_LETTER + 1)?,
                history: readable("retry_history", &history, AFTER_HISTORY, read_history),
            })
        };
        detail().map(Some).map_err(failed)
    }

    /// The letters of one event, oldest first.
    pub async fn of_event(&self, event_id: &str) -> Result<Vec<LetterRow>, StoreError> {
        let failed = |error| store_error("read the dead letters of an event", error);
        let sql = AssertSqlSafe(format!("SELECT {COLUMNS} FROM dlt_event WHERE event_id = ? ORDER BY created_at, id"));
        let rows = sqlx::query(sql).bind(event_id).fetch_all(self.0.database.operators()).await.map_err(failed)?;
        Ok(readable("dlt_event", &rows, 0, read))
    }

    /// Has these letters delivered again now, but for those that were delivered or already wait for a replay.
    pub async fn replay(&self, ids: Vec<String>, reason: Option<String>) -> Result<Replay, StoreError> {
        let id = uuid::Uuid::now_v7().to_string();
        let replay = self.0.database.write("replay dead letters", move |connection| {
            let (id, ids, reason) = (id.clone(), json(&ids), reason.clone());
            Box::pin(async move {
                let mark = format!(
                    "UPDATE dlt_event SET replay_at = {NOW_MS}, replay_id = ?
                     WHERE id IN (SELECT value FROM json_each(?)) AND status <> 1 AND replay_at IS NULL"
                );
                let mark = sqlx::query(AssertSqlSafe(mark)).bind(id.clone()).bind(ids?);
                let matched = mark.execute(&mut *connection).await?.rows_affected();
                let keep = format!("INSERT INTO replay (id, reason, matched, created_at) VALUES (?, ?, ?, {NOW_MS})");
                let keep = sqlx::query(AssertSqlSafe(keep)).bind(id.clone()).bind(reason).bind(matched as i64);
                keep.execute(connection).await?;
                Ok(Replay { id, matched })
            })
        });
        let replay = replay.await?;
        self.0.wakeup.wake();
        Ok(replay)
    }

    /// How far a replay has come; a replay that nobody asked for has nothing to show.
    pub async fn replay_results(&self, replay_id: &str) -> Result<ReplayResults, StoreError> {
        // In one statement, so that a letter settled meanwhile is in exactly one of the two. A letter's last answer counts.
        const RESULTS: &str = "SELECT id, NULL, 1 FROM dlt_event WHERE replay_id = ?1
             UNION ALL
             SELECT letter_id, error_code, 0 FROM retry_history AS answer WHERE replay_id = ?1
                 AND id = (SELECT max(id) FROM retry_history WHERE replay_id = ?1 AND letter_id = answer.letter_id)
                 AND NOT EXISTS (SELECT 1 FROM dlt_event WHERE id = answer.letter_id AND replay_id = ?1)";
        let failed = |error| store_error("read the results of a replay", error);
        let rows = sqlx::query(RESULTS).bind(replay_id).fetch_all(self.0.database.operators()).await.map_err(failed)?;
        let mut answer = ReplayResults { pending: 0, results: Vec::new() };
        for row in &rows {
            if row.try_get(2).map_err(failed)? {
                answer.pending += 1;
                continue;
            }
            let error_code: Option<String> = row.try_get(1).map_err(failed)?;
            let status = if error_code.is_some() { LetterStatus::Failed } else { LetterStatus::Processed };
            answer.results.push(ReplayResult { letter_id: row.try_get(0).map_err(failed)?, status, error_code });
        }
        Ok(answer)
    }

    /// Whether a letter is due and no process has claimed it.
    pub async fn is_due(&self) -> Result<bool, StoreError> {
        let sql = format!(
            "SELECT EXISTS (SELECT 1 FROM dlt_event
                 WHERE due <= {NOW_MS} AND (locked_until IS NULL OR locked_until <= {NOW_MS}))"
        );
        let due = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(self.0.database.operators()).await;
        due.map_err(|error| store_error("look for due dead letters", error))
    }

    /// For how long the letter that is due first has been due.
    pub async fn oldest_due(&self) -> Result<Option<Duration>, StoreError> {
        let failed = |error| store_error("look at the first dead letter", error);
        let sql = format!(
            "SELECT {NOW_MS} - due FROM dlt_event WHERE due IS NOT NULL AND due <= {NOW_MS} ORDER BY due, id LIMIT 1"
        );
        let row = sqlx::query(AssertSqlSafe(sql)).fetch_optional(self.0.database.operators()).await.map_err(failed)?;
        row.map(|row| row.try_get(0).map(span)).transpose().map_err(failed)
    }

    /// How many letters stand where.
    pub async fn depth_by_status(&self) -> Result<Vec<(LetterStatus, u64)>, StoreError> {
        let failed = |error| store_error("count the dead letters", error);
        let sql = "SELECT status, letters FROM dlt_depth ORDER BY status";
        let rows = sqlx::query(sql).fetch_all(self.0.database.operators()).await.map_err(failed)?;
        let depth = |row: &SqliteRow| Ok((LetterStatus::of_code(row.try_get(0)?), row.try_get::<i64, _>(1)? as u64));
        rows.iter().map(depth).collect::<Result<_, _>>().map_err(failed)
    }
}

fn push_conditions(query: &mut QueryBuilder<Sqlite>, filter: &LetterFilter) {
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
        if matches!((filter.from, filter.to), (Some(from), Some(to)) if to - from <= SEARCHABLE) {
            push_like(query, " OR readable", part);
        }
        query.push(")");
    }
}

fn push_like(query: &mut QueryBuilder<Sqlite>, column: &'static str, pattern: String) {
    query.push(column).push(" LIKE ").push_bind(pattern).push(" ESCAPE '\\'");
}

/// A user's text as part of a LIKE pattern, where it stands for itself.
fn literal(text: &str) -> String {
    text.replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_")
}

fn column_of(key: LetterSortKey) -> &'static str {
    match key {
        LetterSortKey::CreatedAt => "created_at",
        LetterSortKey::UpdatedAt => "updated_at",
        LetterSortKey::RetryCount => "retry_count",
    }
}

fn order(filter: &LetterFilter) -> String {
    let (column, way) = (column_of(filter.sort.by), if filter.sort.descending { " DESC" } else { "" });
    format!(" ORDER BY {column}{way}, id{way}")
}

fn read(row: &SqliteRow) -> Result<LetterRow, sqlx::Error> {
    Ok(LetterRow {
        id: row.try_get(0)?,
        delivery_id: row.try_get(1)?,
        event_id: row.try_get(2)?,
        subscription_id: row.try_get(3)?,
        subscriber_id: row.try_get(4)?,
        event_type: row.try_get(5)?,
        domain: row.try_get(6)?,
        endpoint: row.try_get(7)?,
        status: LetterStatus::of_code(row.try_get(8)?),
        retry_count: row.try_get(9)?,
        attempts: row.try_get(10)?,
        error: row.try_get(11)?,
        error_code: row.try_get(12)?,
        error_cause: row.try_get(13)?,
        first_failed_at: time(row.try_get(14)?),
        scheduled_at: row.try_get::<Option<i64>, _>(15)?.map(time),
        replay_id: row.try_get(16)?,
        created_at: time(row.try_get(17)?),
        updated_at: time(row.try_get(18)?),
    })
}

fn read_history(row: &SqliteRow) -> Result<HistoryRow, sqlx::Error> {
    let trigger = match row.try_get::<&str, _>(4)? {
        "REPLAY" => Trigger::Replay { replay_id: row.try_get::<Option<String>, _>(5)?.unwrap_or_default() },
        _ => Trigger::Scheduled,
    };
    Ok(HistoryRow {
        error_code: row.try_get(0)?,
        error_message: row.try_get(1)?,
        error_cause: row.try_get(2)?,
        process_date: time(row.try_get(3)?),
        trigger,
        duration: span(row.try_get(6)?),
    })
}
