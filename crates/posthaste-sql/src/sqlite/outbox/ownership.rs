use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::outbox::{DeadHead, Owner, OwnershipStore, Reader, Registration, lease_millis};
use posthaste_core::{StoreError, lock};
use sqlx::Row;

use super::OutboxStore;
use crate::sqlite::clock::{millis, span};
use crate::sqlite::errors::doing;

/// The first process registers all of its settings. A later process adds those that are missing. Binds: the reader, the
/// mode, the lease in milliseconds, the rule for events after a dead one.
const REGISTER: &str =
    "INSERT INTO {table}_owner AS recorded (only, reader, mode, lease_ms, dead_head) VALUES (1, ?, ?, ?, ?)
     ON CONFLICT (only) DO UPDATE SET
         lease_ms = coalesce(recorded.lease_ms, excluded.lease_ms),
         dead_head = coalesce(recorded.dead_head, excluded.dead_head)
     WHERE recorded.reader = excluded.reader AND recorded.mode = excluded.mode";

const REGISTERED: &str = "SELECT reader, mode, lease_ms, dead_head FROM {table}_owner";

/// An ownership that ends later than eleven tenths of a lease from now was acquired before the clock was set back. Its
/// end is unknown, so it counts as ended. Binds: the owner, the lease in milliseconds.
const ACQUIRE: &str = "UPDATE {table}_owner
     SET generation = generation + (owner IS NOT ?1), owner = ?1, leased_until = {now_ms} + ?2
     WHERE owner IS NULL OR owner = ?1 OR leased_until <= {now_ms} OR leased_until > {now_ms} + ?2 * 11 / 10
     RETURNING generation";

const REMAINING: &str = "SELECT leased_until - {now_ms} FROM {table}_owner";

const RELEASE: &str = "UPDATE {table}_owner SET owner = NULL, leased_until = 0 WHERE owner = ?1";

const VOID: &str = "UPDATE {table}_owner SET owner = NULL, leased_until = 0, lease_ms = NULL";

impl OutboxStore {
    /// Single node: ends the ownership that an earlier process left behind, and clears the lease that it registered, so
    /// that this process may use another lease. Only for a process that knows that no other process uses the file, for
    /// example because it has locked a file beside it, and only before it opens the table.
    pub async fn void_lease(&self) -> Result<(), StoreError> {
        let store = self.clone();
        let write = self.0.database.write("end the ownership of the outbox", move |connection| {
            let void = sqlx::query(store.sql(VOID));
            Box::pin(async move { void.execute(connection).await.map(|_| ()) })
        });
        write.await
    }

    /// The name under which this process last owned the table.
    pub(super) fn last_owner(&self) -> Option<String> {
        lock(&self.0.owner).clone()
    }
}

#[async_trait]
impl OwnershipStore for OutboxStore {
    async fn register(&self, reader: Reader, lease: Duration) -> Result<Registration, StoreError> {
        let store = self.clone();
        let write = self.0.database.write("open the outbox", move |connection| {
            let store = store.clone();
            Box::pin(async move {
                let register = sqlx::query(store.sql(REGISTER)).bind(reader.word()).bind(store.0.mode.word());
                let register = register.bind(lease_millis(lease)).bind(store.0.mode.dead_head().map(DeadHead::word));
                register.execute(&mut *connection).await?;
                let registered: (String, String, Option<i64>, Option<String>) =
                    sqlx::query_as(store.sql(REGISTERED)).fetch_one(connection).await?;
                Ok(registered.into())
            })
        });
        write.await
    }

    async fn registered(&self) -> Result<Option<Registration>, StoreError> {
        let look = async {
            let registered: Option<(String, String, Option<i64>, Option<String>)> =
                sqlx::query_as(self.sql(REGISTERED)).fetch_optional(self.0.database.operators()).await?;
            Ok(registered.map(Registration::from))
        };
        doing("look who reads the outbox", look).await
    }

    async fn acquire_ownership(&self, owner: &str, lease: Duration) -> Result<Owner, StoreError> {
        let (store, asked, lease) = (self.clone(), owner.to_owned(), millis(lease));
        let write = self.0.database.write("acquire the ownership of the outbox", move |connection| {
            let (store, asked) = (store.clone(), asked.clone());
            Box::pin(async move {
                let acquired = sqlx::query(store.sql(ACQUIRE)).bind(asked).bind(lease).fetch_optional(&mut *connection);
                if let Some(row) = acquired.await? {
                    return Ok(Owner::Us { generation: row.try_get(0)? });
                }
                let row = sqlx::query(store.sql(REMAINING)).fetch_one(connection).await?;
                Ok(Owner::Other { remaining: span(row.try_get(0)?) })
            })
        });
        let acquired = write.await?;
        if matches!(acquired, Owner::Us { .. }) {
            *lock(&self.0.owner) = Some(owner.to_owned());
        }
        Ok(acquired)
    }

    async fn release_ownership(&self, owner: &str) -> Result<(), StoreError> {
        let (store, owner) = (self.clone(), owner.to_owned());
        let write = self.0.database.write("release the ownership of the outbox", move |connection| {
            let release = sqlx::query(store.sql(RELEASE)).bind(owner.clone());
            Box::pin(async move { release.execute(connection).await.map(|_| ()) })
        });
        write.await
    }
}
