use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::bus::{Poison, Quarantine};
use sqlx::AssertSqlSafe;
use sqlx::sqlite::SqliteConnection;

use super::LogTables;
use super::append::CHUNK;
use crate::log::{headers_to_text, unwritable};

#[async_trait]
impl Quarantine for LogTables {
    async fn quarantine(&self, group: &str, poison: &[Poison]) -> Result<(), StoreError> {
        const DOING: &str = "quarantine records";
        if poison.is_empty() {
            return Ok(());
        }
        let headers: Result<Vec<_>, _> = poison.iter().map(|poison| headers_to_text(&poison.record.headers)).collect();
        let headers = headers.map_err(|error| unwritable(DOING, error))?;
        let rows: Vec<_> = poison.iter().cloned().zip(headers).collect();
        let write = self.database.write_with(DOING, (group.to_owned(), rows), |connection, arguments| {
            Box::pin(async move { insert(connection, &arguments.0, &arguments.1).await })
        });
        write.await
    }
}

async fn insert(
    connection: &mut SqliteConnection,
    group: &str,
    rows: &[(Poison, Option<String>)],
) -> Result<(), sqlx::Error> {
    for rows in rows.chunks(CHUNK) {
        let values = vec!["(?,?,?,?,?,?,?,?)"; rows.len()].join(",");
        let sql = format!(
            "INSERT INTO quarantined_record (group_name, topic, partition, \"offset\", key, value, headers, reason)
             VALUES {values} ON CONFLICT DO NOTHING"
        );
        let mut insert = sqlx::query(AssertSqlSafe(sql));
        for (Poison { record, reason }, headers) in rows {
            let position = &record.position;
            insert = insert.bind(group).bind(&*position.topic).bind(position.partition).bind(position.offset);
            insert = insert.bind(&record.key).bind(&record.value[..]).bind(headers.as_deref()).bind(reason);
        }
        insert.execute(&mut *connection).await?;
    }
    Ok(())
}
