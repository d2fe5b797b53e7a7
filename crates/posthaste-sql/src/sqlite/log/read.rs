use bytes::Bytes;
use futures_util::TryStreamExt;
use posthaste_core::StoreError;
use posthaste_core::log::{Newest, StoredRecord};
use sqlx::Row;
use sqlx::sqlite::{SqlitePool, SqliteRow};

use crate::log::{read_headers, unwritable};
use crate::sqlite::Database;
use crate::sqlite::errors::{doing, store_error};
use crate::unreadable::{report, text};

/// One range scan per partition, in the order of the list. CROSS JOIN fixes the order of the partitions, and the index
/// that of the offsets. The statement names the index, so that the planner cannot choose another one. So nothing is
/// sorted, and the limit ends the scan.
const READ: &str = "
    SELECT record.partition_id, record.\"offset\", record.key, record.value, record.headers
    FROM json_each(?1) AS place
    CROSS JOIN log_record AS record INDEXED BY log_record_place
       ON record.partition_id = place.value ->> 0 AND record.\"offset\" >= place.value ->> 1
    LIMIT ?2";

/// The newest record and the newest partition: one index lookup each.
const NEWEST: &str = "SELECT (SELECT max(rowid) FROM log_record), (SELECT max(id) FROM log_partition)";

pub(super) async fn newest(database: &Database) -> Result<Newest, StoreError> {
    let newest = sqlx::query_as(NEWEST).fetch_one(database.readers());
    let (record, partition) = doing("look at the end of the log", newest).await?;
    Ok(Newest { record, partition })
}

/// Stops after the record with which the read has this many bytes.
pub(super) async fn read(
    connections: &SqlitePool,
    places: &[(i64, i64)],
    limit: usize,
    max_bytes: usize,
) -> Result<(Vec<StoredRecord>, bool), StoreError> {
    const DOING: &str = "read the log";
    let places = serde_json::to_string(places).map_err(|error| unwritable(DOING, error))?;
    let limit_bound = i64::try_from(limit).unwrap_or(i64::MAX);
    let mut stream = sqlx::query(READ).bind(places).bind(limit_bound).fetch(connections);
    let mut read = Vec::new();
    let (mut rows, mut bytes) = (0, 0);
    while let Some(row) = stream.try_next().await.map_err(|error| store_error(DOING, error))? {
        rows += 1;
        match record(&row) {
            Ok(record) => {
                bytes += record.value.len();
                read.push(record);
            }
            Err(error) => report("log_record", &format!("{} {}", text(&row, 0), text(&row, 1)), &error),
        }
        if bytes >= max_bytes {
            return Ok((read, true));
        }
    }
    Ok((read, rows == limit))
}

/// Reads a row. Unreadable columns become the `damage`; only a row without partition and offset is an error.
fn record(row: &SqliteRow) -> Result<StoredRecord, sqlx::Error> {
    let mut record = StoredRecord {
        partition_id: row.try_get(0)?,
        offset: row.try_get(1)?,
        key: text(row, 2),
        value: Bytes::from(row.try_get_unchecked::<Option<Vec<u8>>, _>(3)?.unwrap_or_default()),
        headers: Vec::new(),
        damage: None,
    };
    read_headers(&mut record, row.try_get(4), || text(row, 4));
    if let Err(error) = row.try_get::<String, _>(2) {
        record.damage = Some(format!("its key is not text: {error}"));
    }
    Ok(record)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqlite::plans::plan_of;

    #[tokio::test]
    async fn a_read_is_a_range_scan_per_partition_and_sorts_nothing() {
        let plan = plan_of(READ).await;
        assert_eq!(plan.len(), 2, "{plan:?}");
        assert!(plan[0].starts_with("SCAN place VIRTUAL TABLE"), "{plan:?}");
        assert_eq!(plan[1], "SEARCH record USING INDEX log_record_place (partition_id=? AND offset>?)");
    }
}
