use std::sync::Arc;

use posthaste_core::StoreError;
use sqlx::SqliteConnection;

use super::OutboxStore;

/// How many rows one transaction marks at most: if a program inserts many of them, other writers must not wait for
/// long.
const MARKED_AT_ONCE: i64 = 10_000;

/// An event type that is not text in UTF-8. Only other programs can write one.
pub(super) struct UndecodableType {
    /// True for a text that is not valid UTF-8. Otherwise it is a BLOB, which equals no text, even one with the same
    /// bytes.
    pub(super) is_text: bool,
    pub(super) bytes: Vec<u8>,
}

/// It marks nothing if another process owns the table: that process marks the rows itself. This process need not own
/// the table, because no channel can claim these rows.
pub(super) const MARK_DEAD: &str =
    "UPDATE {table} SET status = 3, done_at = {now}, last_error = ?3, locked_by = NULL, locked_at = NULL
     WHERE seq IN (SELECT seq FROM {table} INDEXED BY {table}_pending_of_type
                   WHERE status IN (0, 2) AND event_type = CASE WHEN ?1 THEN CAST(?2 AS TEXT) ELSE ?2 END LIMIT ?4)
       AND EXISTS (SELECT 1 FROM {table}_owner WHERE owner IS NULL OR owner = ?5 OR leased_until <= {now_ms})";

impl OutboxStore {
    /// Marks the rows of these types as DEAD, with the reason. A failure is logged, and the caller continues.
    pub(super) async fn mark_undecodable_dead(&self, types: Vec<UndecodableType>) {
        match self.try_mark_dead(types).await {
            Ok(0) => {}
            Ok(rows) => {
                tracing::error!(table = %self.0.table, rows, "marked outbox rows whose event type is not text as DEAD")
            }
            Err(error) => tracing::warn!(
                error = error.chain(),
                "failed to mark undecodable outbox rows as DEAD: trying again later"
            ),
        }
    }

    async fn try_mark_dead(&self, types: Vec<UndecodableType>) -> Result<u64, StoreError> {
        let (store, types) = (self.clone(), Arc::new(types));
        let mark = self.0.database.write("mark undecodable rows of the outbox as DEAD", move |connection| {
            let (store, types) = (store.clone(), types.clone());
            Box::pin(async move { store.mark_dead(connection, &types).await })
        });
        mark.await
    }

    async fn mark_dead(
        &self,
        connection: &mut SqliteConnection,
        types: &[UndecodableType],
    ) -> Result<u64, sqlx::Error> {
        const REASON: &str = "undecodable: event_type is not text in UTF-8";
        let owner = self.last_owner();
        let mut marked = 0;
        for UndecodableType { is_text, bytes } in types {
            let mark = sqlx::query(self.sql(MARK_DEAD)).bind(is_text).bind(&bytes[..]).bind(REASON);
            let mark = mark.bind(MARKED_AT_ONCE - marked as i64).bind(&owner);
            marked += mark.execute(&mut *connection).await?.rows_affected();
            if marked as i64 >= MARKED_AT_ONCE {
                break;
            }
        }
        Ok(marked)
    }
}
