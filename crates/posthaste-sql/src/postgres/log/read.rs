use bytes::Bytes;
use posthaste_core::StoreError;
use posthaste_core::log::{Newest, StoredRecord};
use sqlx::postgres::PgRow;
use sqlx::{FromRow, Postgres, Row};

use super::{LogTables, READ, STATEMENT_TIMEOUT, limited};
use crate::log::read_headers;
use crate::outbox::limit as bound;
use crate::postgres::errors::store_error;
use crate::session::Session;
use crate::unreadable::{report, text};

/// One range scan per partition, in the order of the list, until there are enough records or bytes. The size of a value
/// is known without reading it, so values after the limit are not read. Binds: the partitions, the offset to begin with
/// in each, the limit, the limit of each partition, and the bytes after which no further record is read.
pub(super) const READ_RECORDS: &str = "
         SELECT partition_id, \"offset\", key, value, headers, found FROM (
             SELECT *, count(*) OVER () AS found,
                 sum(octet_length(value)) OVER (ORDER BY place, \"offset\" ROWS UNBOUNDED PRECEDING)
                     - octet_length(value) AS bytes_before
             FROM (
                 SELECT place.number AS place, record.*
                 FROM unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS place (id, start, number)
                 CROSS JOIN LATERAL (
                     SELECT partition_id, \"offset\", key, value, headers FROM log_record
                     WHERE partition_id = place.id AND \"offset\" >= place.start
                     ORDER BY \"offset\" LIMIT $4
                 ) AS record
                 ORDER BY place.number, record.\"offset\" LIMIT $3
             ) AS record
         ) AS measured
         WHERE bytes_before < $5
         ORDER BY place, \"offset\"";

/// Every append adds to the sum. The highest number of a record would not do: records become visible in another order
/// than they are numbered, if they are in different partitions. The same is true for the ids of partitions, so these
/// are counted.
pub(super) const NEWEST: &str = "SELECT coalesce(sum(next_offset), 0)::bigint, count(*) FROM log_partition";

pub(super) async fn newest(tables: &LogTables) -> Result<Newest, StoreError> {
    const DOING: &str = "look at the end of the log";
    let rows = tables.run(DOING, sqlx::query(NEWEST)).await?;
    let newest = rows.first().map(<(i64, i64)>::from_row).transpose().map_err(|error| store_error(DOING, error))?;
    Ok(Newest { record: newest.map(|(records, _)| records), partition: newest.map(|(_, partitions)| partitions) })
}

/// How much one read returns.
pub(super) struct Limits {
    pub(super) records: usize,
    pub(super) records_per_partition: usize,
    /// A single record may be larger.
    pub(super) bytes: usize,
}

pub(super) async fn read(
    connections: &Session<Postgres>,
    places: &[(i64, i64)],
    limits: Limits,
) -> Result<(Vec<StoredRecord>, bool), StoreError> {
    let (ids, offsets): (Vec<i64>, Vec<i64>) = places.iter().copied().unzip();
    let limit = bound(limits.records);
    let query = sqlx::query(READ_RECORDS).bind(ids).bind(offsets).bind(limit);
    let query = query.bind(bound(limits.records_per_partition)).bind(bound(limits.bytes));
    let read = async {
        let mut work = connections.begin(READ).await?;
        let rows = query.fetch_all(&mut *work).await?;
        work.commit().await?;
        Ok(rows)
    };
    let rows = limited("read the log", STATEMENT_TIMEOUT, read).await?;
    let found = rows.first().map_or(0, |row| row.try_get("found").unwrap_or(0i64));
    let is_full = found >= limit || bound(rows.len()) < found;
    let read = |row: &PgRow| {
        let place = || format!("{:?} {:?}", row.try_get::<i64, _>(0), row.try_get::<i64, _>(1));
        record(row).inspect_err(|error| report("log_record", &place(), error)).ok()
    };
    Ok((rows.iter().filter_map(read).collect(), is_full))
}

/// Reads a row. Unreadable headers become the `damage`.
fn record(row: &PgRow) -> Result<StoredRecord, sqlx::Error> {
    let mut record = StoredRecord {
        partition_id: row.try_get(0)?,
        offset: row.try_get(1)?,
        key: row.try_get(2)?,
        value: Bytes::from(row.try_get::<Vec<u8>, _>(3)?),
        headers: Vec::new(),
        damage: None,
    };
    read_headers(&mut record, row.try_get(4), || text(row, 4));
    Ok(record)
}
