use std::collections::{HashMap, HashSet};

use async_trait::async_trait;
use posthaste_core::outbox::{InTransaction, WriteStore};
use posthaste_core::{Delay, Event, FaultKind, Payload, StoreError};
use sqlx::{MySql, MySqlConnection, Row, Transaction};

use super::{OutboxStore, list};
use crate::begin::begin;
use crate::mysql::clock::{micros, storable};
use crate::mysql::errors::{commit_error, doing, number, store_error};
use crate::outbox::{bind_event, chunks};

/// The server numbers the rows in their order in the statement.
const INSERT: &str =
    "INSERT INTO {table} (event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service,
         resource_type, operation_type, payload, payload_bytes, content_type, headers, occurred_at, created_at,
         available_at, locked_by, locked_at)
     VALUES ";

/// Statements with at most this many rows are kept prepared: each number of rows makes another statement.
const KEPT: usize = 8;

/// The numbers of the events with these ids. Binds: the ids.
///
/// The numbers are queried, because the steps between them depend on the server's settings.
const NUMBERS: &str = "SELECT event_id, seq
     FROM JSON_TABLE(?, '$[*]' COLUMNS (id VARCHAR(128) PATH '$')) AS listed
     STRAIGHT_JOIN {table} ON event_id = CONVERT(listed.id USING utf8mb4) COLLATE utf8mb4_bin";

/// Those of the rows that still exist. After a deadlock has rolled a transaction back, the server commits the
/// statements after it and reports success. Binds: the rows.
const SURVIVING: &str = "SELECT seq FROM {rows}";

/// True if a transaction is open. Outside of one a savepoint ends with the statement that made it.
async fn is_in_transaction(connection: &mut MySqlConnection) -> Result<bool, sqlx::Error> {
    const NO_SUCH_SAVEPOINT: u16 = 1305;
    sqlx::raw_sql("SAVEPOINT posthaste_probe").execute(&mut *connection).await?;
    match sqlx::raw_sql("RELEASE SAVEPOINT posthaste_probe").execute(connection).await {
        Ok(_) => Ok(true),
        Err(error) if number(&error) == Some(NO_SUCH_SAVEPOINT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Binds of each row: the columns up to `occurred_at`, the delay if it has one, the claim id if there is one.
pub(super) fn insert(events: &[&Event], is_claimed: bool) -> String {
    let mut sql = INSERT.to_owned();
    for (place, event) in events.iter().enumerate() {
        let available_at = match event.delay() {
            Delay::None => "{now}",
            Delay::Until(_) => "?",
            Delay::For(_) => "{now} + INTERVAL ? MICROSECOND",
        };
        let lease = if is_claimed { "?, {now}" } else { "NULL, NULL" };
        let comma = if place == 0 { "" } else { ", " };
        sql.push_str(comma);
        sql.push_str("(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {now}, ");
        sql.push_str(available_at);
        sql.push_str(", ");
        sql.push_str(lease);
        sql.push(')');
    }
    sql
}

#[async_trait]
impl WriteStore for OutboxStore {
    type Connection = MySqlConnection;
    type Transaction = Transaction<'static, MySql>;

    /// No: sqlx loses track of the server's answers if a statement is dropped while it is being prepared. Later
    /// statements on that connection then read the wrong answers, or wait for ever.
    fn is_cancel_safe(&self) -> bool {
        false
    }

    async fn begin(&self) -> Result<Self::Transaction, StoreError> {
        begin(&self.pool, None).await.map_err(|error| store_error("begin a transaction", error))
    }

    async fn commit(&self, transaction: Self::Transaction) -> Result<(), StoreError> {
        transaction.commit().await.map_err(|error| commit_error("commit a transaction", error))
    }

    async fn rollback(&self, transaction: Self::Transaction) -> Result<(), StoreError> {
        transaction.rollback().await.map_err(|error| store_error("roll back a transaction", error))
    }

    async fn insert(
        &self,
        connection: &mut MySqlConnection,
        events: &[&Event],
        claim_id: Option<&str>,
    ) -> Result<Vec<i64>, StoreError> {
        let insert = async {
            let mut numbers = Vec::with_capacity(events.len());
            for chunk in chunks(events, |event| event.weight()) {
                numbers.extend(self.insert_chunk(connection, chunk, claim_id).await?);
            }
            Ok(numbers)
        };
        doing("write to the outbox", insert).await
    }

    async fn surviving(&self, connection: &mut MySqlConnection, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        const DOING: &str = "commit a transaction";
        let failed = |error| store_error(DOING, error);
        let mut surviving: HashSet<i64> = HashSet::new();
        if !rows.is_empty() {
            let found = sqlx::query_scalar(self.sql(SURVIVING)).bind(list(rows)).fetch_all(&mut *connection);
            let found: Vec<i64> = found.await.map_err(failed)?;
            surviving.extend(found);
        }
        // After a deadlock the server has rolled everything back, and commits every later statement by itself.
        let is_complete = !rows.is_empty() && surviving.len() == rows.len();
        if !is_complete && !is_in_transaction(connection).await.map_err(failed)? {
            let reason = "the database rolled it back after an error that was ignored";
            return Err(StoreError::new(DOING, FaultKind::OutcomeUnknown, reason));
        }
        Ok(surviving)
    }
}

impl InTransaction<OutboxStore> for Transaction<'_, MySql> {
    fn connection(&mut self) -> &mut MySqlConnection {
        self
    }

    /// sqlx does not report the end of its transactions.
    fn begun_by_outbox(&mut self) -> Option<&mut posthaste_core::outbox::Transaction<OutboxStore>> {
        None
    }
}

impl OutboxStore {
    async fn insert_chunk(
        &self,
        connection: &mut MySqlConnection,
        events: &[&Event],
        claim_id: Option<&str>,
    ) -> Result<Vec<i64>, sqlx::Error> {
        let is_usual = events.len() == 1 || (events.len() <= KEPT && !events.iter().any(|event| event.is_delayed()));
        let mut query = sqlx::query(self.sql(&insert(events, claim_id.is_some()))).persistent(is_usual);
        for event in events {
            let (text, bytes) = match event.payload() {
                Payload::Text(text) => (Some(text.as_str()), None),
                Payload::Bytes(bytes) => (None, Some(&**bytes)),
            };
            query = bind_event!(query, event, text, bytes).bind(storable(event.occurred_at()));
            query = match event.delay() {
                Delay::None => query,
                Delay::Until(at) => query.bind(storable(at)),
                Delay::For(wait) => query.bind(micros(wait)),
            };
            if let Some(claim_id) = claim_id {
                query = query.bind(claim_id);
            }
        }
        let inserted = query.execute(&mut *connection).await?;
        match events {
            [_] => Ok(vec![inserted.last_insert_id() as i64]),
            _ => self.numbers(connection, events).await,
        }
    }

    /// The numbers of the rows, in the order of the events.
    async fn numbers(&self, connection: &mut MySqlConnection, events: &[&Event]) -> Result<Vec<i64>, sqlx::Error> {
        let ids: Vec<&str> = events.iter().map(|event| event.id()).collect();
        let rows =
            sqlx::query(self.sql(NUMBERS)).bind(serde_json::json!(ids).to_string()).fetch_all(connection).await?;
        let mut by_id: HashMap<String, i64> = HashMap::with_capacity(rows.len());
        for row in &rows {
            by_id.insert(row.try_get(0)?, row.try_get(1)?);
        }
        ids.into_iter().map(|id| by_id.get(id).copied().ok_or(sqlx::Error::RowNotFound)).collect()
    }
}
