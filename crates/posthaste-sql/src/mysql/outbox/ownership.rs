use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::outbox::{DeadHead, Owner, OwnershipStore, Reader, Registration, lease_millis};
use sqlx::Row;

use super::{BEGIN_OWN, OutboxStore};
use crate::mysql::clock::{micros, span};
use crate::mysql::errors::doing;

/// The first process registers all of its settings. A later process adds those that are missing. Binds: the reader, the
/// mode, the lease in milliseconds, the rule for events after a dead one.
const REGISTER: &str = "INSERT INTO {table}_owner (reader, mode, lease_ms, dead_head) VALUES (?, ?, ?, ?)
     ON DUPLICATE KEY UPDATE
         lease_ms = IF(reader = VALUES(reader) AND mode = VALUES(mode), COALESCE(lease_ms, VALUES(lease_ms)), lease_ms),
         dead_head = IF(reader = VALUES(reader) AND mode = VALUES(mode), COALESCE(dead_head, VALUES(dead_head)), dead_head)";

const REGISTERED: &str = "SELECT reader, mode, lease_ms, dead_head FROM {table}_owner";

/// The generation is assigned first, because an assignment may see the values of earlier ones. Binds: the owner twice,
/// the lease in microseconds, the owner, eleven tenths of the lease in microseconds.
///
/// An ownership that ends later than eleven tenths of a lease from now was acquired before the clock was set back. Its
/// end is unknown, so it counts as ended.
const ACQUIRE: &str = "UPDATE {table}_owner
     SET generation = generation + IF(owner <=> ?, 0, 1), owner = ?, leased_until = {now} + INTERVAL ? MICROSECOND
     WHERE owner IS NULL OR owner = ? OR leased_until <= {now} OR leased_until > {now} + INTERVAL ? MICROSECOND";

/// Binds: the owner.
const ACQUIRED: &str =
    "SELECT owner <=> ?, generation, TIMESTAMPDIFF(MICROSECOND, {now}, leased_until) FROM {table}_owner";

const RELEASE: &str = "UPDATE {table}_owner SET owner = NULL, leased_until = {now} WHERE owner = ?";

#[async_trait]
impl OwnershipStore for OutboxStore {
    async fn register(&self, reader: Reader, lease: Duration) -> Result<Registration, StoreError> {
        let register = async {
            let register = sqlx::query(self.sql(REGISTER)).bind(reader.word()).bind(self.mode.word());
            let register = register.bind(lease_millis(lease)).bind(self.mode.dead_head().map(DeadHead::word));
            let mut connection = self.connection().await?;
            register.execute(&mut *connection).await?;
            let registered: (String, String, Option<i64>, Option<String>) =
                sqlx::query_as(self.sql(REGISTERED)).fetch_one(&mut *connection).await?;
            connection.finish();
            Ok(registered.into())
        };
        doing("open the outbox", register).await
    }

    async fn registered(&self) -> Result<Option<Registration>, StoreError> {
        let look = async {
            let mut connection = self.connection().await?;
            let registered: Option<(String, String, Option<i64>, Option<String>)> =
                sqlx::query_as(self.sql(REGISTERED)).fetch_optional(&mut *connection).await?;
            connection.finish();
            Ok(registered.map(Registration::from))
        };
        doing("look who reads the outbox", look).await
    }

    async fn acquire_ownership(&self, owner: &str, lease: Duration) -> Result<Owner, StoreError> {
        let acquire = async {
            let mut work = self.renewals.begin(BEGIN_OWN).await?;
            let acquire = sqlx::query(self.sql(ACQUIRE)).bind(owner).bind(owner).bind(micros(lease)).bind(owner);
            acquire.bind(micros(lease + lease / 10)).execute(&mut *work).await?;
            let row = sqlx::query(self.sql(ACQUIRED)).bind(owner).fetch_one(&mut *work).await?;
            let owner = match row.try_get(0)? {
                true => Owner::Us { generation: row.try_get(1)? },
                false => Owner::Other { remaining: span(row.try_get(2)?) },
            };
            work.commit().await?;
            Ok(owner)
        };
        doing("acquire the ownership of the outbox", acquire).await
    }

    async fn release_ownership(&self, owner: &str) -> Result<(), StoreError> {
        let release = async {
            let mut work = self.renewals.begin(BEGIN_OWN).await?;
            sqlx::query(self.sql(RELEASE)).bind(owner).execute(&mut *work).await?;
            work.commit().await
        };
        doing("release the ownership of the outbox", release).await
    }
}
