use std::collections::{BTreeMap, HashMap};

use posthaste_core::StoreError;
use posthaste_core::log::NewRecord;
use sqlx::AssertSqlSafe;
use sqlx::sqlite::SqliteConnection;

use crate::log::{headers_to_text, partitions_of_topics, unwritable};
use crate::sqlite::Database;

/// The maximum number of rows that one statement inserts. It is large, because each statement costs a switch to another
/// thread. It is bounded, so that the prepared statements of all row counts stay in the cache.
pub(super) const CHUNK: usize = 64;

const MAKE_PARTITIONS: &str = "
    INSERT INTO log_partition (topic, partition)
    SELECT topic.value, partition.value FROM json_each(?1) AS topic CROSS JOIN json_each(?2) AS partition
    WHERE NOT EXISTS (SELECT 1 FROM log_partition AS made WHERE made.topic = topic.value)";

const PARTITIONS: &str = "
    SELECT topic, id FROM log_partition WHERE topic IN (SELECT value FROM json_each(?1)) ORDER BY topic, partition";

/// Assigns offsets to an append: the counters move in the transaction that inserts the records.
const ASSIGN_OFFSETS: &str = "
    UPDATE log_partition SET next_offset = next_offset + append.count
    FROM (SELECT value ->> 0 AS id, value ->> 1 AS count FROM json_each(?1)) AS append
    WHERE log_partition.id = append.id
    RETURNING id, next_offset";

pub(super) async fn create_topics(
    database: &Database,
    names: Vec<String>,
    partitions: u32,
) -> Result<Vec<(String, Vec<i64>)>, StoreError> {
    const DOING: &str = "create topics";
    let numbers: Vec<u32> = (0..partitions).collect();
    let numbers = serde_json::to_string(&numbers).map_err(|error| unwritable(DOING, error))?;
    let list = serde_json::to_string(&names).map_err(|error| unwritable(DOING, error))?;
    let create = database.write_with(DOING, (list, numbers), |connection, arguments| {
        Box::pin(async move {
            let (list, numbers) = &*arguments;
            sqlx::query(MAKE_PARTITIONS).bind(list).bind(numbers).execute(&mut *connection).await?;
            sqlx::query_as::<_, (String, i64)>(PARTITIONS).bind(list).fetch_all(connection).await
        })
    });
    Ok(partitions_of_topics(create.await?))
}

pub(super) async fn append(database: &Database, records: Vec<NewRecord>) -> Result<(), StoreError> {
    const DOING: &str = "append to the log";
    let mut rows = Vec::with_capacity(records.len());
    for record in records {
        let headers = headers_to_text(&record.headers).map_err(|error| unwritable(DOING, error))?;
        rows.push((record, headers));
    }
    database.write_with(DOING, rows, |connection, rows| Box::pin(async move { insert(connection, &rows).await })).await
}

async fn insert(connection: &mut SqliteConnection, rows: &[(NewRecord, Option<String>)]) -> Result<(), sqlx::Error> {
    let mut counts: BTreeMap<i64, i64> = BTreeMap::new();
    rows.iter().for_each(|(record, _)| *counts.entry(record.partition_id).or_default() += 1);
    let list: Vec<(i64, i64)> = counts.iter().map(|(&id, &count)| (id, count)).collect();
    let list = serde_json::to_string(&list).map_err(|error| sqlx::Error::Encode(error.into()))?;
    let assigned: Vec<(i64, i64)> = sqlx::query_as(ASSIGN_OFFSETS).bind(list).fetch_all(&mut *connection).await?;
    let mut offsets: HashMap<i64, i64> =
        assigned.into_iter().map(|(id, next_offset)| (id, next_offset - counts[&id])).collect();
    for rows in rows.chunks(CHUNK) {
        let values = vec!["(?,?,?,?,?)"; rows.len()].join(",");
        let sql = format!("INSERT INTO log_record (partition_id, \"offset\", key, value, headers) VALUES {values}");
        let mut insert = sqlx::query(AssertSqlSafe(sql));
        for (record, headers) in rows {
            let offset = offsets.get_mut(&record.partition_id).ok_or(sqlx::Error::RowNotFound)?;
            insert = insert.bind(record.partition_id).bind(*offset);
            insert = insert.bind(record.key.as_str()).bind(&record.value[..]).bind(headers.as_deref());
            *offset += 1;
        }
        insert.execute(&mut *connection).await?;
    }
    Ok(())
}
