//! Rows that cannot be read, because a person, another program or a disk fault changed them.
//!
//! Such a row must not keep other rows of its table from being read. It is reported with its key and left out.

use std::fmt::Display;

use posthaste_core::metric_names::UNREADABLE_ROWS;
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

/// Logs and counts a row that is left out.
pub(super) fn report(table: &'static str, key: &str, error: &dyn Display) {
    metrics::counter!(UNREADABLE_ROWS, "table" => table).increment(1);
    tracing::error!(table, key, %error, "a row cannot be read and is left out: correct or delete it");
}

/// Reads the rows that can be read, and reports the others by the key in column `key`.
pub(super) fn readable<T>(
    table: &'static str,
    rows: &[SqliteRow],
    key: usize,
    read: impl Fn(&SqliteRow) -> Result<T, sqlx::Error>,
) -> Vec<T> {
    let read = |row: &SqliteRow| read(row).inspect_err(|error| report(table, &text(row, key), error)).ok();
    rows.iter().filter_map(read).collect()
}

/// The value of a column as text, for any type of value.
pub(super) fn text(row: &SqliteRow, column: usize) -> String {
    let bytes = row.try_get_unchecked::<Option<Vec<u8>>, _>(column).ok().flatten().unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}
