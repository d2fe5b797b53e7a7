//! The statements that a database must implement for an outbox, one trait for each role.
//!
//! The statements report what happened. Everything that follows from it is in this crate, once for all databases: which
//! rows are claimed ([`select`](super::select)), what this process has in flight, when leases are renewed, and what an
//! attempt means for its row ([`RowUpdate`](super::RowUpdate)).

mod claim;
mod lease;
mod notify;
mod operator;
mod ownership;
mod settle;
mod write;

use async_trait::async_trait;

pub use claim::{
    BlockedRows, ClaimRequest, ClaimStore, ClaimedRow, ClaimedRows, LOST_CLAIM_SCAN, Position, unblock_limit,
};
pub use lease::{LeaseSet, LeaseStore};
pub use notify::Notifier;
pub use operator::{DeadFilter, MAX_LISTED_TYPES, OperatorStore, OutboxRow, Purge};
pub use ownership::{Owner, OwnershipStore};
pub use settle::{SettleStore, SettledRows};
pub use write::{InTransaction, WriteStore};

use super::{Mode, OpenError, TableName};

/// One outbox table in one database.
///
/// # Laws of all its roles
///
/// - Times are the database's own, read inside the statement: `now` in the laws is that clock.
/// - Every method MUST be one transaction, or part of the caller's transaction if a connection is given.
/// - A row is *pending* while its status is NEW or RETRY. It is *unfinished* while it is pending, or DEAD if a dead
///   head blocks its key.
pub trait Store:
    OwnershipStore + WriteStore + ClaimStore + LeaseStore + SettleStore + OperatorStore + Send + Sync + 'static
{
    /// The table.
    fn table(&self) -> &TableName;

    /// How the table is read.
    fn mode(&self) -> Mode;

    /// How the database notifies other processes; `None` if it cannot.
    fn notifier(&self) -> Option<&dyn Notifier>;

    /// True if statements may run on a thread and a runtime of their own, where no listener can delay them. False for a
    /// store on the clock of a test.
    fn runs_on_own_thread(&self) -> bool;
}

/// A service's connections to its database, from which its [`Store`] is opened.
#[async_trait]
pub trait Pool<S: Store>: Send + Sync + 'static {
    /// Brings the table up to date and opens it.
    async fn open(&self, table: TableName, mode: Mode) -> Result<S, OpenError>;

    /// Opens a table that is up to date. Fails with [`OpenError::OldSchema`] if it is not, and changes nothing.
    async fn open_existing(&self, table: TableName, mode: Mode) -> Result<S, OpenError>;
}
