use std::time::Duration;

use posthaste_core::outbox::{DeadHead, Owner, Reader, Registration, lease_millis, recorded_lease};
use sqlx::Row;
use sqlx::mysql::MySqlRow;

use super::{BEGIN_OWN, OutboxStore};
use crate::mysql::clock::{micros, span};
use crate::session::Failed;

/// The first process records everything, a later one what the record lacks. Binds: the reader, the mode, the lease in
/// milliseconds, the rule for what is behind a dead event.
const REGISTER: &str = "INSERT INTO {table}_owner (reader, mode, lease_ms, dead_head) VALUES (?, ?, ?, ?)
     ON DUPLICATE KEY UPDATE
         lease_ms = IF(reader = VALUES(reader) AND mode = VALUES(mode), COALESCE(lease_ms, VALUES(lease_ms)), lease_ms),
         dead_head = IF(reader = VALUES(reader) AND mode = VALUES(mode), COALESCE(dead_head, VALUES(dead_head)), dead_head)";

const REGISTERED: &str = "SELECT reader, mode, lease_ms, dead_head FROM {table}_owner";

/// The generation comes first, because assignments may see what is assigned before them. Binds: the owner twice, the
/// lease in microseconds, the owner, the lease in microseconds.
///
/// An ownership that ends later than a lease is long was taken before the clock was set back: nobody can tell when it ends,
/// so it has ended.
const TAKE: &str = "UPDATE {table}_owner
     SET generation = generation + IF(owner <=> ?, 0, 1), owner = ?, leased_until = {now} + INTERVAL ? MICROSECOND
     WHERE owner IS NULL OR owner = ? OR leased_until <= {now} OR leased_until > {now} + INTERVAL ? MICROSECOND";

/// Binds: the owner.
const TAKEN: &str =
    "SELECT owner <=> ?, generation, TIMESTAMPDIFF(MICROSECOND, {now}, leased_until) FROM {table}_owner";

const GIVE_UP: &str = "UPDATE {table}_owner SET owner = NULL, leased_until = {now} WHERE owner = ?";

impl OutboxStore {
    pub(super) async fn register_reader(&self, reader: Reader, lease: Duration) -> Result<Registration, sqlx::Error> {
        let register = sqlx::query(self.sql(REGISTER)).bind(reader.word()).bind(self.mode.word());
        let register = register.bind(lease_millis(lease)).bind(self.mode.dead_head().map(DeadHead::word));
        register.execute(&self.pool).await?;
        registration(&sqlx::query(self.sql(REGISTERED)).fetch_one(&self.pool).await?)
    }

    pub(super) async fn take_ownership(&self, owner: &str, lease: Duration) -> Result<Owner, Failed> {
        let mut work = self.renewals.begin(BEGIN_OWN).await?;
        let take = sqlx::query(self.sql(TAKE)).bind(owner).bind(owner).bind(micros(lease)).bind(owner);
        take.bind(micros(lease + lease / 10)).execute(&mut *work).await?;
        let row = sqlx::query(self.sql(TAKEN)).bind(owner).fetch_one(&mut *work).await?;
        let taken = match row.try_get(0)? {
            true => Owner::Us { generation: row.try_get(1)? },
            false => Owner::Other { remaining: span(row.try_get(2)?) },
        };
        work.commit().await?;
        Ok(taken)
    }

    pub(super) async fn end_ownership(&self, owner: &str) -> Result<(), Failed> {
        let mut work = self.renewals.begin(BEGIN_OWN).await?;
        sqlx::query(self.sql(GIVE_UP)).bind(owner).execute(&mut *work).await?;
        work.commit().await
    }
}

fn registration(row: &MySqlRow) -> Result<Registration, sqlx::Error> {
    Ok(Registration {
        reader: row.try_get(0)?,
        mode: row.try_get(1)?,
        lease: row.try_get::<Option<i64>, _>(2)?.map(recorded_lease),
        dead_head: row.try_get(3)?,
    })
}
