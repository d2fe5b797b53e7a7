use std::collections::HashSet;

use async_trait::async_trait;
use chrono::SecondsFormat;
use posthaste_core::outbox::{InTransaction, WriteStore};
use posthaste_core::{Delay, Event, FaultKind, Payload, StoreError};
use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row, Sqlite, SqliteConnection};

use super::OutboxStore;
use super::transaction::Transaction;
use crate::outbox::{bind_event, chunks};
use crate::sqlite::clock::{modifier, storable};
use crate::sqlite::errors::{commit_error, doing, store_error};

/// How many rows one statement inserts at most: enough to make its cost per row small, few enough that statements of
/// every size stay prepared.
const CHUNK: usize = 64;

const COLUMNS: &str = "event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service, resource_type, \
     operation_type, payload, payload_bytes, content_type, headers, occurred_at, available_at";

const ROW: &str = "?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, coalesce(?, strftime('%Y-%m-%dT%H:%M:%fZ', 'now', ?))";

#[async_trait]
impl WriteStore for OutboxStore {
    type Connection = SqliteConnection;
    type Transaction = Transaction;

    fn is_cancel_safe(&self) -> bool {
        true
    }

    async fn begin(&self) -> Result<Transaction, StoreError> {
        const DOING: &str = "begin a transaction";
        let Some(service) = &self.0.service else {
            let remedy = "this outbox has no pool of a service: open it from one";
            return Err(StoreError::new(DOING, FaultKind::Permanent, remedy));
        };
        doing(DOING, Transaction::begin(service, self.0.database.writer_lock())).await
    }

    async fn commit(&self, transaction: Transaction) -> Result<(), StoreError> {
        transaction.commit().await.map_err(|error| commit_error("commit a transaction", error))
    }

    async fn rollback(&self, transaction: Transaction) -> Result<(), StoreError> {
        transaction.rollback().await.map_err(|error| store_error("roll back a transaction", error))
    }

    async fn insert(
        &self,
        connection: &mut SqliteConnection,
        events: &[&Event],
        claim_id: Option<&str>,
    ) -> Result<Vec<i64>, StoreError> {
        let insert = async {
            let rows = self.insert_rows(connection, events, claim_id, "RETURNING seq").await?;
            let mut numbers = rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<i64>, _>>()?;
            // SQLite numbers the rows in the order of the events, but may return the numbers in another order.
            numbers.sort_unstable();
            Ok(numbers)
        };
        doing("write to the outbox", insert).await
    }

    /// SQLite refuses the COMMIT of a transaction that it has rolled back itself.
    async fn surviving(&self, _: &mut SqliteConnection, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        Ok(rows.iter().copied().collect())
    }
}

/// A transaction of sqlx waits for the lock of the file as SQLite does: at its first write or, better, at its beginning
/// with `pool.begin_with("BEGIN IMMEDIATE")`. A transaction that reads before it writes may fail, and must then be
/// repeated.
impl InTransaction<OutboxStore> for sqlx::Transaction<'_, Sqlite> {
    fn connection(&mut self) -> &mut SqliteConnection {
        self
    }

    /// sqlx does not report the end of its transactions.
    fn begun_by_outbox(&mut self) -> Option<&mut posthaste_core::outbox::Transaction<OutboxStore>> {
        None
    }
}

impl OutboxStore {
    /// Inserts in order, many rows to a statement, and returns what the clause `after` returns.
    pub(super) async fn insert_rows(
        &self,
        connection: &mut SqliteConnection,
        events: &[&Event],
        claim_id: Option<&str>,
        after: &'static str,
    ) -> Result<Vec<SqliteRow>, sqlx::Error> {
        let (columns, row) = match claim_id {
            Some(_) => (format!("{COLUMNS}, locked_by, locked_at"), format!("({ROW}, ?, {{now}})")),
            None => (COLUMNS.to_owned(), format!("({ROW})")),
        };
        let mut returned = Vec::new();
        for chunk in chunks(events, |event| event.weight()).flat_map(|part| part.chunks(CHUNK)) {
            let rows = vec![row.as_str(); chunk.len()].join(", ");
            let sql = self.sql(&format!("INSERT INTO {{table}} ({columns}) VALUES {rows} {after}"));
            returned.extend(insert_chunk(connection, sql, chunk, claim_id).await?);
        }
        Ok(returned)
    }
}

async fn insert_chunk(
    connection: &mut SqliteConnection,
    sql: AssertSqlSafe<String>,
    chunk: &[&Event],
    claim_id: Option<&str>,
) -> Result<Vec<SqliteRow>, sqlx::Error> {
    let mut query = sqlx::query(sql);
    for event in chunk {
        let (text, bytes) = match event.payload() {
            Payload::Text(text) => (Some(text.as_str()), None),
            Payload::Bytes(bytes) => (None, Some(&bytes[..])),
        };
        let (until, wait) = match event.delay() {
            Delay::None => (None, "+0 seconds".to_owned()),
            Delay::Until(at) => {
                (Some(storable(at).to_rfc3339_opts(SecondsFormat::Millis, true)), "+0 seconds".to_owned())
            }
            Delay::For(wait) => (None, modifier(wait)),
        };
        query = bind_event!(query, event, text, bytes)
            .bind(storable(event.occurred_at()).to_rfc3339_opts(SecondsFormat::AutoSi, true))
            .bind(until)
            .bind(wait);
        if let Some(claim_id) = claim_id {
            query = query.bind(claim_id);
        }
    }
    query.fetch_all(connection).await
}
