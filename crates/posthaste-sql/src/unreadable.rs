//! Rows that cannot be read, because a person, another program or a disk fault changed them.
//!
//! Such a row must not keep other rows of its table from being read. It is reported with its key and left out.

use std::fmt::Display;

use posthaste_core::metric_names::UNREADABLE_ROWS;
use sqlx::{ColumnIndex, Decode, Row};

/// Logs and counts a row that is left out.
pub(crate) fn report(table: &'static str, key: &str, error: &dyn Display) {
    metrics::counter!(UNREADABLE_ROWS, "table" => table).increment(1);
    tracing::error!(table, key, %error, "a row cannot be read and is left out: correct or delete it");
}

/// Reads the rows that can be read, and reports the others by the key in column `key`.
pub(crate) fn readable<R: Row, T>(
    table: &'static str,
    rows: &[R],
    key: usize,
    read: impl Fn(&R) -> Result<T, sqlx::Error>,
) -> Vec<T>
where
    usize: ColumnIndex<R>,
    for<'r> Vec<u8>: Decode<'r, R::Database>,
{
    let read = |row: &R| read(row).inspect_err(|error| report(table, &text(row, key), error)).ok();
    rows.iter().filter_map(read).collect()
}

/// The value of a column as text. On SQLite, for any type of value; on PostgreSQL, for a text.
pub(crate) fn text<R: Row>(row: &R, column: usize) -> String
where
    usize: ColumnIndex<R>,
    for<'r> Vec<u8>: Decode<'r, R::Database>,
{
    let bytes = row.try_get_unchecked::<Option<Vec<u8>>, _>(column).ok().flatten().unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}
