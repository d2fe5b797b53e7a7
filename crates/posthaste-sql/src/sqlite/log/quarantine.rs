mod list;
mod operator;
mod retention;

use std::collections::HashSet;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::bus::{Poison, Quarantine};
use sqlx::AssertSqlSafe;
use sqlx::sqlite::SqliteConnection;
use uuid::Uuid;

use super::LogTables;
use super::append::CHUNK;
use crate::log::{headers_to_text, unwritable};

/// A record with its new id and the text of its headers.
struct NewRow {
    id: String,
    poison: Poison,
    headers: Option<String>,
}

#[async_trait]
impl Quarantine for LogTables {
    async fn quarantine(&self, group: &str, poison: &[Poison]) -> Result<(), StoreError> {
        const DOING: &str = "quarantine records";
        if poison.is_empty() {
            return Ok(());
        }
        let mut rows = Vec::with_capacity(poison.len());
        for poison in poison {
            let headers = headers_to_text(&poison.record.headers).map_err(|error| unwritable(DOING, error))?;
            rows.push(NewRow { id: Uuid::now_v7().to_string(), poison: poison.clone(), headers });
        }
        let write = self.database.write_with(DOING, (group.to_owned(), rows), |connection, arguments| {
            Box::pin(async move { insert(connection, &arguments.0, &arguments.1).await })
        });
        write.await
    }
}

async fn insert(connection: &mut SqliteConnection, group: &str, rows: &[NewRow]) -> Result<(), sqlx::Error> {
    for rows in rows.chunks(CHUNK) {
        let values = vec!["(?,?,?,?,?,?,?,?,?,?)"; rows.len()].join(",");
        let sql = format!(
            "INSERT INTO quarantined_record (id, group_name, topic, partition, \"offset\", fingerprint, key,
                 headers, reason, replayable)
             VALUES {values} ON CONFLICT DO NOTHING
             RETURNING id"
        );
        let mut insert = sqlx::query_scalar(AssertSqlSafe(sql));
        for NewRow { id, poison: Poison { record, reason }, headers } in rows {
            let position = &record.position;
            insert = insert.bind(id).bind(group).bind(&*position.topic).bind(position.partition).bind(position.offset);
            insert = insert
                .bind(record.fingerprint().cast_signed())
                .bind(&record.key)
                .bind(headers.as_deref())
                .bind(reason)
                .bind(record.damage.is_none());
        }
        let inserted: HashSet<String> = insert.fetch_all(&mut *connection).await?.into_iter().collect();
        if inserted.is_empty() {
            continue;
        }
        let values = vec!["(?,?)"; inserted.len()].join(",");
        let sql = format!("INSERT INTO quarantined_value (record_id, value) VALUES {values}");
        let mut insert = sqlx::query(AssertSqlSafe(sql));
        for NewRow { id, poison, .. } in rows.iter().filter(|row| inserted.contains(&row.id)) {
            insert = insert.bind(id).bind(&poison.record.value[..]);
        }
        insert.execute(&mut *connection).await?;
    }
    Ok(())
}
