use std::time::Duration;

use super::{Reader, TableName};
use crate::{BoxError, StoreError};

/// Why an outbox cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The database is not suitable for an outbox as it is.
    #[error("{problem}: {remedy}")]
    Unsuitable {
        /// What is wrong with it.
        problem: String,
        /// What to do about it.
        remedy: String,
    },
    /// A newer program created its table.
    #[error(
        "outbox table {table} has schema {found}, newer than this program, which knows {known}: use a newer posthaste"
    )]
    NewerSchema {
        /// The table in question.
        table: TableName,
        /// The newest migration that was applied.
        found: i64,
        /// The newest migration that this program knows.
        known: i64,
    },
    /// Its table is missing or out of date, and this process does not change it.
    #[error("outbox table {table} {}: let a user who may create tables run the migrations", found.map_or_else(
        || "does not exist, or this user may not read it".to_owned(),
        |found| format!("has schema {found}, older than {known}, which this program needs"),
    ))]
    OldSchema {
        /// The table in question.
        table: TableName,
        /// The newest migration that was applied; `None` if none was found.
        found: Option<i64>,
        /// The newest migration that this program knows.
        known: i64,
    },
    /// Its table is missing or out of date, and this user may not change that.
    #[error("outbox table {table} cannot be brought up to date: let a user who may create tables run the migrations")]
    Migration {
        /// The table in question.
        table: TableName,
        /// What went wrong.
        #[source]
        source: BoxError,
    },
    /// Its table belongs to the other kind of reader.
    #[error(
        "outbox table {table} is read by {recorded} and cannot be read by {asked}: give this one another table name"
    )]
    OtherReader {
        /// The table in question.
        table: TableName,
        /// The kind that opened it first.
        recorded: String,
        /// The kind that was asked for now.
        asked: Reader,
    },
    /// Its table is read in another mode; a reader in one mode cannot see the claims of another mode.
    #[error(
        "outbox table {table} is read in mode {recorded} and cannot be read in mode {asked}: use that mode, or stop all \
         that read it and then change mode in table {table}_owner"
    )]
    OtherMode {
        /// The table in question.
        table: TableName,
        /// The mode in which it was opened first.
        recorded: String,
        /// The mode that was asked for now.
        asked: &'static str,
    },
    /// Its table is read with another lease; each process decides by its own lease if that of another process has
    /// ended.
    #[error(
        "outbox table {table} is read with a lease of {recorded:?} and cannot be read with one of {asked:?}: use that \
         lease in all processes, or stop all that read the table and then set lease_ms to NULL in table {table}_owner, \
         so that the next start records its own"
    )]
    OtherLease {
        /// The table in question.
        table: TableName,
        /// The lease with which it was opened first.
        recorded: Duration,
        /// The lease that was asked for now.
        asked: Duration,
    },
    /// Its table is read with another rule for the events after a dead one.
    #[error(
        "outbox table {table} is read with the rule {recorded} for events after a dead one and cannot be read with the \
         rule {asked}: use that rule in all processes, or stop all that read the table and then set dead_head to NULL in \
         table {table}_owner, so that the next start records its own"
    )]
    OtherDeadHead {
        /// The table in question.
        table: TableName,
        /// The rule with which it was opened first, a value of [`DeadHead::word`](super::DeadHead::word).
        recorded: String,
        /// The rule that was asked for now.
        asked: &'static str,
    },
    /// A call of the database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}
