use std::collections::HashSet;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use posthaste_core::outbox::{InTransaction, WriteStore};
use posthaste_core::{Delay, Event, Payload, StoreError};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Postgres, Row, Transaction};

use super::OutboxStore;
use crate::begin::begin;
use crate::outbox::{bind_event, chunks, write_headers};
use crate::postgres::clock::{micros, storable};
use crate::postgres::errors::{commit_error, doing, store_error};

/// The columns of [`VALUES`].
const COLUMNS: &str = "event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service, resource_type, \
     operation_type, payload, payload_bytes, content_type, headers, occurred_at, created_at, available_at, locked_by, \
     locked_at, payload_is_text";

const VALUES: &str = "event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service, resource_type,
         operation_type, payload, payload_bytes, content_type, headers, occurred_at, {now},
         coalesce(until, {now} + wait * interval '1 microsecond'), $16, CASE WHEN $16 IS NOT NULL THEN {now} END,
         payload_is_text";

/// The events of the arrays, in order.
const EVENTS: &str =
    "unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
             $9::text[], $10::bytea[], $11::text[], $12::text[], $13::timestamptz[], $14::timestamptz[], $15::bigint[],
             $17::boolean[])
         WITH ORDINALITY AS event (event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service,
             resource_type, operation_type, payload, payload_bytes, content_type, headers, occurred_at, until, wait,
             payload_is_text, place)";

/// The server numbers the rows in the order of the arrays, which is the order of the events.
fn insert() -> String {
    format!(
        "INSERT INTO {{table}} ({COLUMNS})
         SELECT {VALUES} FROM {EVENTS} ORDER BY place
         RETURNING seq"
    )
}

/// Inserts those events whose ids the table does not have, and returns their ids. Its binds are those of [`insert`].
///
/// Two processes may insert the same ids at once: the second waits for the first. The rows are inserted in the order of
/// their ids, so that two such statements never wait for each other. They are numbered before, in the order of the
/// events.
pub(super) fn insert_new() -> String {
    format!(
        "INSERT INTO {{table}} (seq, {COLUMNS}) OVERRIDING SYSTEM VALUE
         SELECT seq, {VALUES}
         FROM (SELECT nextval(pg_get_serial_sequence('{{table}}', 'seq')) AS seq, event.* FROM {EVENTS} ORDER BY place)
             AS numbered
         ORDER BY event_id
         ON CONFLICT (event_id) DO NOTHING
         RETURNING event_id"
    )
}

/// The usual case: one event in a transaction. Its binds are those of [`insert`], each a value.
const INSERT_ONE: &str =
    "INSERT INTO {table} (event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service,
         resource_type, operation_type, payload, payload_bytes, content_type, headers, occurred_at, created_at,
         available_at, locked_by, locked_at, payload_is_text)
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, {now},
         coalesce($14, {now} + $15 * interval '1 microsecond'), $16, CASE WHEN $16 IS NOT NULL THEN {now} END, $17)
     RETURNING seq";

#[async_trait]
impl WriteStore for OutboxStore {
    type Connection = PgConnection;
    type Transaction = Transaction<'static, Postgres>;

    fn is_cancel_safe(&self) -> bool {
        true
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
        connection: &mut PgConnection,
        events: &[&Event],
        claim_id: Option<&str>,
    ) -> Result<Vec<i64>, StoreError> {
        let insert = async {
            if let [event] = events {
                return Ok(vec![self.insert_one(connection, event, claim_id).await?]);
            }
            let mut numbers = Vec::with_capacity(events.len());
            for chunk in chunks(events, |event| event.weight()) {
                let rows = self.insert_chunk(connection, &insert(), chunk, claim_id).await?;
                numbers.extend(rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<i64>, _>>()?);
            }
            Ok(numbers)
        };
        doing("write to the outbox", insert).await
    }

    async fn surviving(&self, connection: &mut PgConnection, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        // PostgreSQL reports success for the COMMIT of a transaction in which a statement has failed, but it refuses
        // any other statement in it. Reading the rows themselves would cost a transaction half its time.
        let ask = sqlx::query("SELECT 1").execute(connection).await;
        ask.map_err(|error| store_error("commit a transaction", error))?;
        Ok(rows.iter().copied().collect())
    }
}

impl InTransaction<OutboxStore> for Transaction<'_, Postgres> {
    fn connection(&mut self) -> &mut PgConnection {
        self
    }

    /// sqlx does not report the end of its transactions.
    fn begun_by_outbox(&mut self) -> Option<&mut posthaste_core::outbox::Transaction<OutboxStore>> {
        None
    }
}

impl OutboxStore {
    async fn insert_one(
        &self,
        connection: &mut PgConnection,
        event: &Event,
        claim_id: Option<&str>,
    ) -> Result<i64, sqlx::Error> {
        let (text, bytes) = (text_of(event.payload()), bytes_of(event.payload()));
        let insert = bind_event!(sqlx::query(self.sql(INSERT_ONE)), event, text, bytes)
            .bind(storable(event.occurred_at()))
            .bind(until(event))
            .bind(wait(event))
            .bind(claim_id)
            .bind(is_text_in_bytes(event.payload()));
        insert.fetch_one(connection).await?.try_get(0)
    }

    /// Runs [`insert`] or [`insert_new`].
    pub(super) async fn insert_chunk(
        &self,
        connection: &mut PgConnection,
        sql: &str,
        events: &[&Event],
        claim_id: Option<&str>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        fn column<'a, T>(events: &[&'a Event], of: impl Fn(&'a Event) -> T) -> Vec<T> {
            events.iter().map(|event| of(event)).collect()
        }
        let insert = sqlx::query(self.sql(sql))
            .bind(column(events, Event::id))
            .bind(column(events, Event::event_type))
            .bind(column(events, Event::aggregate_type))
            .bind(column(events, Event::aggregate_id))
            .bind(column(events, Event::tenant_id))
            .bind(column(events, Event::source_service))
            .bind(column(events, Event::resource_type))
            .bind(column(events, Event::operation_type))
            .bind(column(events, |event| text_of(event.payload())))
            .bind(column(events, |event| bytes_of(event.payload())))
            .bind(column(events, Event::content_type))
            .bind(column(events, |event| write_headers(event.headers())))
            .bind(column(events, |event| storable(event.occurred_at())))
            .bind(column(events, until))
            .bind(column(events, wait))
            .bind(claim_id)
            .bind(column(events, |event| is_text_in_bytes(event.payload())));
        insert.fetch_all(connection).await
    }
}

/// PostgreSQL cannot store U+0000 in a text: a payload with it is stored as bytes and marked as text.
fn text_of(payload: &Payload) -> Option<&str> {
    match payload {
        Payload::Text(text) if !text.contains('\0') => Some(text),
        Payload::Text(_) | Payload::Bytes(_) => None,
    }
}

fn bytes_of(payload: &Payload) -> Option<&[u8]> {
    match text_of(payload) {
        Some(_) => None,
        None => Some(payload.as_bytes()),
    }
}

/// `None` in the usual case: NULL takes no space in the row.
fn is_text_in_bytes(payload: &Payload) -> Option<bool> {
    match payload {
        Payload::Text(text) if text.contains('\0') => Some(true),
        Payload::Text(_) | Payload::Bytes(_) => None,
    }
}

fn until(event: &Event) -> Option<DateTime<Utc>> {
    match event.delay() {
        Delay::Until(at) => Some(storable(at)),
        Delay::None | Delay::For(_) => None,
    }
}

fn wait(event: &Event) -> i64 {
    match event.delay() {
        Delay::For(wait) => micros(wait),
        Delay::None | Delay::Until(_) => 0,
    }
}
