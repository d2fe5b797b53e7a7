use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use posthaste_core::bus::Record;
use posthaste_core::{StoreError, lock};
use sqlx::AssertSqlSafe;
use sqlx::sqlite::SqliteConnection;

use super::{Log, headers_to_text, unreadable};
use crate::sqlite::errors::store_error;

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

/// Records to be appended, sorted by partition.
struct Append {
    rows: Vec<Row>,
    /// Partition → the number of its rows.
    counts: BTreeMap<i64, i64>,
}

struct Row {
    partition_id: i64,
    key: String,
    value: Bytes,
    headers: Option<String>,
}

impl Log {
    /// Appends all records in one transaction, or none.
    pub(super) async fn append(&self, records: Vec<Record>) -> Result<(), StoreError> {
        const DOING: &str = "append to the log";
        let topics: BTreeSet<Arc<str>> = records.iter().map(|record| Arc::clone(&record.topic)).collect();
        let partitions = self.partitions_of(&topics).await?;
        let append = Append::of(records, &partitions).map_err(|error| store_error(DOING, error))?;
        let write = self
            .0
            .database
            .write_with(DOING, append, |connection, append| Box::pin(async move { append.write(connection).await }));
        write.await?;
        self.wake_readers_of(&topics);
        Ok(())
    }

    async fn partitions_of(&self, topics: &BTreeSet<Arc<str>>) -> Result<HashMap<Arc<str>, Arc<[i64]>>, StoreError> {
        let mut found = HashMap::new();
        let mut missing = Vec::new();
        {
            let known = lock(&self.0.partitions);
            for topic in topics {
                match known.get(topic) {
                    Some(ids) => _ = found.insert(Arc::clone(topic), Arc::clone(ids)),
                    None => missing.push(topic.to_string()),
                }
            }
        }
        if !missing.is_empty() {
            found.extend(self.make_topics(missing).await?);
        }
        Ok(found)
    }

    async fn make_topics(&self, names: Vec<String>) -> Result<HashMap<Arc<str>, Arc<[i64]>>, StoreError> {
        const DOING: &str = "make a topic";
        let numbers: Vec<u32> = (0..self.0.options.partitions).collect();
        let numbers = serde_json::to_string(&numbers).map_err(|error| unreadable(DOING, error))?;
        let list = serde_json::to_string(&names).map_err(|error| unreadable(DOING, error))?;
        let mut ids: HashMap<String, Vec<i64>> = HashMap::new();
        let make = self.0.database.write_with(DOING, (list, numbers), |connection, arguments| {
            Box::pin(async move {
                let (list, numbers) = &*arguments;
                sqlx::query(MAKE_PARTITIONS).bind(list).bind(numbers).execute(&mut *connection).await?;
                sqlx::query_as::<_, (String, i64)>(PARTITIONS).bind(list).fetch_all(connection).await
            })
        });
        for (topic, id) in make.await? {
            ids.entry(topic).or_default().push(id);
        }
        let made: HashMap<Arc<str>, Arc<[i64]>> =
            ids.into_iter().map(|(topic, ids)| (topic.into(), ids.into())).collect();
        lock(&self.0.partitions).extend(made.clone());
        self.partitions_changed(|subscription| names.iter().any(|topic| subscription.reads(topic)));
        Ok(made)
    }
}

impl Append {
    fn of(records: Vec<Record>, partitions: &HashMap<Arc<str>, Arc<[i64]>>) -> Result<Self, sqlx::Error> {
        let mut rows = Vec::with_capacity(records.len());
        let mut counts = BTreeMap::new();
        for record in records {
            // Missing only if the database changed the name.
            let ids = partitions.get(&record.topic).ok_or(sqlx::Error::RowNotFound)?;
            let partition_id = ids[(record.route % ids.len() as u64) as usize];
            *counts.entry(partition_id).or_default() += 1;
            let headers = headers_to_text(&record.headers).map_err(encode_error)?;
            rows.push(Row { partition_id, key: record.key, value: record.value, headers });
        }
        // A stable sort: records of one partition keep their order.
        rows.sort_by_key(|row| row.partition_id);
        Ok(Self { rows, counts })
    }

    async fn write(&self, connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
        let counts: Vec<(i64, i64)> = self.counts.iter().map(|(&id, &count)| (id, count)).collect();
        let counts = serde_json::to_string(&counts).map_err(encode_error)?;
        let mut offsets: HashMap<i64, i64> = HashMap::new();
        let assigned: Vec<(i64, i64)> = sqlx::query_as(ASSIGN_OFFSETS).bind(counts).fetch_all(&mut *connection).await?;
        for (id, next_offset) in assigned {
            offsets.insert(id, next_offset - self.counts[&id]);
        }
        for rows in self.rows.chunks(CHUNK) {
            let values = vec!["(?,?,?,?,?)"; rows.len()].join(",");
            let sql = format!("INSERT INTO log_record (partition_id, \"offset\", key, value, headers) VALUES {values}");
            let mut insert = sqlx::query(AssertSqlSafe(sql));
            for row in rows {
                let offset = offsets.get_mut(&row.partition_id).ok_or(sqlx::Error::RowNotFound)?;
                insert = insert.bind(row.partition_id).bind(*offset);
                insert = insert.bind(row.key.as_str()).bind(&row.value[..]).bind(row.headers.as_deref());
                *offset += 1;
            }
            insert.execute(&mut *connection).await?;
        }
        Ok(())
    }
}

fn encode_error(error: serde_json::Error) -> sqlx::Error {
    sqlx::Error::Encode(error.into())
}
