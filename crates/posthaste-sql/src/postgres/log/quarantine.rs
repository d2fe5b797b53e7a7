pub(super) mod list;
pub(super) mod operator;
pub(super) mod retention;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::bus::{Poison, Quarantine};
use uuid::Uuid;

use super::LogTables;
use crate::log::{headers_to_text, unwritable};
use crate::postgres::texts::storable_text;

/// The rows are inserted in the order of the unique key, so that two consumers with the same records never wait for
/// each other.
const INSERT: &str = "
    INSERT INTO quarantined_record
        (id, group_name, topic, partition, \"offset\", fingerprint, key, value, headers, reason, replayable)
    SELECT id, $1, topic, partition, place, fingerprint, key, value, headers, reason, replayable
    FROM unnest($2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::text[], $8::bytea[], $9::text[],
            $10::text[], $11::boolean[])
        AS poison (id, topic, partition, place, fingerprint, key, value, headers, reason, replayable)
    ORDER BY topic, partition, place, fingerprint
    ON CONFLICT DO NOTHING";

#[async_trait]
impl Quarantine for LogTables {
    async fn quarantine(&self, group: &str, poison: &[Poison]) -> Result<(), StoreError> {
        const DOING: &str = "quarantine records";
        fn column<'a, T>(poison: &'a [Poison], of: impl Fn(&'a Poison) -> T) -> Vec<T> {
            poison.iter().map(of).collect()
        }
        if poison.is_empty() {
            return Ok(());
        }
        let headers: Result<Vec<_>, _> = poison.iter().map(|poison| headers_to_text(&poison.record.headers)).collect();
        let insert = sqlx::query(INSERT)
            .bind(group)
            .bind(column(poison, |_| Uuid::now_v7().to_string()))
            .bind(column(poison, |poison| &*poison.record.position.topic))
            .bind(column(poison, |poison| i64::from(poison.record.position.partition)))
            .bind(column(poison, |poison| poison.record.position.offset))
            .bind(column(poison, |poison| poison.record.fingerprint().cast_signed()))
            .bind(column(poison, |poison| storable_text(&poison.record.key)))
            .bind(column(poison, |poison| &poison.record.value[..]))
            .bind(headers.map_err(|error| unwritable(DOING, error))?)
            .bind(column(poison, |poison| storable_text(&poison.reason)))
            .bind(column(poison, |poison| poison.record.damage.is_none() && !poison.record.key.contains('\0')));
        self.run(DOING, insert).await.map(|_| ())
    }
}
