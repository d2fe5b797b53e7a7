use std::collections::{BTreeMap, HashSet};

use posthaste_core::StoreError;
use posthaste_core::log::NewRecord;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{FromRow, Postgres};

use super::{LogTables, STATEMENT_TIMEOUT, WRITE, limited};
use crate::log::{headers_to_text, partitions_of_topics, unwritable};
use crate::outbox::chunks;
use crate::session::Failed;

const PARTITIONS: &str = "SELECT topic, id FROM log_partition WHERE topic = ANY ($1) ORDER BY topic, partition";

/// Topics are created one process at a time. Otherwise two processes with different numbers of partitions could each
/// create a part of a topic.
const LOCK_TOPICS: &str = "SELECT pg_advisory_xact_lock(hashtext('posthaste create topics'))";

const MAKE_PARTITIONS: &str = "
    INSERT INTO log_partition (topic, partition)
    SELECT new.topic, number FROM unnest($1::text[]) AS new (topic) CROSS JOIN generate_series(0, $2 - 1) AS number
    WHERE NOT EXISTS (SELECT 1 FROM log_partition WHERE log_partition.topic = new.topic)
    ORDER BY new.topic, number";

/// Assigns offsets and inserts the records in one round trip. The function is in the migrations.
const APPEND: &str = "SELECT log_append($1, $2, $3, $4, $5, $6, $7)";

pub(super) async fn create_topics(
    tables: &LogTables,
    names: &[String],
    number: u32,
) -> Result<Vec<(String, Vec<i64>)>, StoreError> {
    const DOING: &str = "create topics";
    let create = async {
        // The usual case: another process has created them, or this one before its restart.
        let existing = partitions(&tables.pipeline.fetch(sqlx::query(PARTITIONS).bind(names)).await?)?;
        let is_found: HashSet<&str> = existing.iter().map(|(topic, _)| topic.as_str()).collect();
        if names.iter().all(|name| is_found.contains(name.as_str())) {
            return Ok(existing);
        }
        let mut work = tables.pipeline.begin(WRITE).await?;
        sqlx::query(LOCK_TOPICS).execute(&mut *work).await?;
        let number = i32::try_from(number).unwrap_or(i32::MAX);
        sqlx::query(MAKE_PARTITIONS).bind(names).bind(number).execute(&mut *work).await?;
        let rows = sqlx::query(PARTITIONS).bind(names).fetch_all(&mut *work).await?;
        work.commit().await?;
        Ok(partitions(&rows)?)
    };
    limited(DOING, STATEMENT_TIMEOUT, create).await
}

fn partitions(rows: &[PgRow]) -> Result<Vec<(String, Vec<i64>)>, sqlx::Error> {
    let rows: Result<_, _> = rows.iter().map(<(String, i64)>::from_row).collect();
    Ok(partitions_of_topics(rows?))
}

pub(super) async fn append(tables: &LogTables, records: &[NewRecord]) -> Result<(), StoreError> {
    const DOING: &str = "append to the log";
    let mut batches = Vec::new();
    for records in chunks(records, |record| record.key.len() + record.value.len()) {
        batches.push(Batch::of(records).map_err(|error| unwritable(DOING, error))?);
    }
    if let [batch] = &batches[..] {
        return tables.run(DOING, batch.statement()).await.map(|_| ());
    }
    // The records are sorted by partition. So these statements together lock partitions in the order of their ids, too.
    let append = async {
        let mut work = tables.pipeline.begin(WRITE).await?;
        for batch in &batches {
            batch.statement().execute(&mut *work).await.map_err(Failed::Statement)?;
        }
        work.commit().await
    };
    limited(DOING, STATEMENT_TIMEOUT, append).await
}

/// The binds of [`APPEND`].
struct Batch<'a> {
    partitions: Vec<i64>,
    counts: Vec<i64>,
    partition_ids: Vec<i64>,
    places: Vec<i64>,
    keys: Vec<&'a str>,
    headers: Vec<Option<String>>,
    values: Vec<&'a [u8]>,
}

impl<'a> Batch<'a> {
    fn of(records: &'a [NewRecord]) -> Result<Self, serde_json::Error> {
        let mut counts: BTreeMap<i64, i64> = BTreeMap::new();
        let mut place = |record: &NewRecord| {
            let count = counts.entry(record.partition_id).or_default();
            *count += 1;
            *count - 1
        };
        let places = records.iter().map(&mut place).collect();
        let (partitions, counts) = counts.into_iter().unzip();
        Ok(Self {
            partitions,
            counts,
            partition_ids: records.iter().map(|record| record.partition_id).collect(),
            places,
            keys: records.iter().map(|record| record.key.as_str()).collect(),
            headers: records.iter().map(|record| headers_to_text(&record.headers)).collect::<Result<_, _>>()?,
            values: records.iter().map(|record| &record.value[..]).collect(),
        })
    }

    fn statement(&self) -> Query<'_, Postgres, PgArguments> {
        sqlx::query(APPEND)
            .bind(&self.partitions)
            .bind(&self.counts)
            .bind(&self.partition_ids)
            .bind(&self.places)
            .bind(&self.keys)
            .bind(&self.headers)
            .bind(&self.values)
    }
}
