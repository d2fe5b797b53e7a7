use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::outbox::{DeadHead, Owner, OwnershipStore, Reader, Registration, lease_millis};
use sqlx::Row;

use super::OutboxStore;
use super::settle::CHANGE;
use crate::postgres::clock::{micros, span};
use crate::postgres::errors::doing;

/// The first process registers all of its settings. A later process adds those that are missing. Binds: the reader, the
/// mode, the lease in milliseconds, the rule for events after a dead one.
const REGISTER: &str =
    "INSERT INTO {table}_owner AS recorded (reader, mode, lease_ms, dead_head) VALUES ($1, $2, $3, $4)
     ON CONFLICT (one_row) DO UPDATE SET
         lease_ms = coalesce(recorded.lease_ms, excluded.lease_ms),
         dead_head = coalesce(recorded.dead_head, excluded.dead_head)
     WHERE recorded.reader = excluded.reader AND recorded.mode = excluded.mode";

const REGISTERED: &str = "SELECT reader, mode, lease_ms, dead_head FROM {table}_owner";

/// An ownership that ends later than eleven tenths of a lease from now was acquired before the clock was set back. Its
/// end is unknown, so it counts as ended. Binds: the owner, the lease in microseconds.
const ACQUIRE: &str = "UPDATE {table}_owner
     SET generation = generation + (owner IS DISTINCT FROM $1)::integer, owner = $1,
         leased_until = {now} + $2 * interval '1 microsecond'
     WHERE owner IS NULL OR owner = $1 OR leased_until <= {now}
        OR leased_until > {now} + $2 * 11 / 10 * interval '1 microsecond'
     RETURNING generation";

const REMAINING: &str = "SELECT (extract(epoch FROM leased_until - {now}) * 1000000)::bigint FROM {table}_owner";

const RELEASE: &str = "UPDATE {table}_owner SET owner = NULL, leased_until = {now} WHERE owner = $1";

#[async_trait]
impl OwnershipStore for OutboxStore {
    async fn register(&self, reader: Reader, lease: Duration) -> Result<Registration, StoreError> {
        let register = async {
            let register = sqlx::query(self.sql(REGISTER)).bind(reader.word()).bind(self.mode.word());
            let register = register.bind(lease_millis(lease)).bind(self.mode.dead_head().map(DeadHead::word));
            register.execute(&self.pool).await?;
            let registered: (String, String, Option<i64>, Option<String>) =
                sqlx::query_as(self.sql(REGISTERED)).fetch_one(&self.pool).await?;
            Ok(registered.into())
        };
        doing("open the outbox", register).await
    }

    async fn registered(&self) -> Result<Option<Registration>, StoreError> {
        let look = async {
            let registered: Option<(String, String, Option<i64>, Option<String>)> =
                sqlx::query_as(self.sql(REGISTERED)).fetch_optional(&self.pool).await?;
            Ok(registered.map(Registration::from))
        };
        doing("look who reads the outbox", look).await
    }

    async fn acquire_ownership(&self, owner: &str, lease: Duration) -> Result<Owner, StoreError> {
        let acquire = async {
            let mut work = self.renewals.begin(CHANGE).await?;
            let acquire = sqlx::query(self.sql(ACQUIRE)).bind(owner).bind(micros(lease));
            let owner = match acquire.fetch_optional(&mut *work).await? {
                Some(row) => Owner::Us { generation: row.try_get(0)? },
                None => {
                    let row = sqlx::query(self.sql(REMAINING)).fetch_one(&mut *work).await?;
                    Owner::Other { remaining: span(row.try_get(0)?) }
                }
            };
            work.commit().await?;
            Ok(owner)
        };
        doing("acquire the ownership of the outbox", acquire).await
    }

    async fn release_ownership(&self, owner: &str) -> Result<(), StoreError> {
        let release = async {
            let mut work = self.renewals.begin(CHANGE).await?;
            sqlx::query(self.sql(RELEASE)).bind(owner).execute(&mut *work).await?;
            work.commit().await
        };
        doing("release the ownership of the outbox", release).await
    }
}
