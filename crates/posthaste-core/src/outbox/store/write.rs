use std::collections::HashSet;
use std::ops::DerefMut;

use async_trait::async_trait;

use crate::outbox::{Store, Transaction};
use crate::{Event, StoreError};

/// Transactions of the service, and inserts in them.
#[async_trait]
pub trait WriteStore {
    /// The connection on which statements of the service run.
    type Connection: Send;
    /// Begun by [`begin`](Self::begin); rolled back when it is dropped.
    type Transaction: DerefMut<Target = Self::Connection> + Send + 'static;

    /// True if a connection can be used again after the future of a statement was dropped half way.
    fn is_cancel_safe(&self) -> bool;

    /// Begins a transaction of the service. A database with one writer waits for the writer lock here.
    async fn begin(&self) -> Result<Self::Transaction, StoreError>;

    /// Commits. An error of kind [`OutcomeUnknown`](crate::FaultKind::OutcomeUnknown) means that it may have committed.
    async fn commit(&self, transaction: Self::Transaction) -> Result<(), StoreError>;

    /// Rolls back.
    async fn rollback(&self, transaction: Self::Transaction) -> Result<(), StoreError>;

    /// Inserts events in this order, many rows to a statement, and returns the numbers of their rows in the same order.
    /// `created_at` is `now`, and so is the `available_at` of an event that is not delayed until a time (plus its
    /// delay).
    ///
    /// With a claim id the rows are pre-claimed: `locked_by` is the claim id, and `locked_at` is `now`.
    async fn insert(
        &self,
        connection: &mut Self::Connection,
        events: &[&Event],
        claim_id: Option<&str>,
    ) -> Result<Vec<i64>, StoreError>;

    /// Returns those of these rows, inserted in the transaction of this connection, that would survive a commit: a
    /// database may have rolled them back after an error that the service ignored.
    ///
    /// An error means that the transaction cannot commit any more, even if the database would report its COMMIT as a
    /// success. An error of kind [`OutcomeUnknown`](crate::FaultKind::OutcomeUnknown) means that parts of it may have
    /// been committed.
    async fn surviving(&self, connection: &mut Self::Connection, rows: &[i64]) -> Result<HashSet<i64>, StoreError>;
}

/// A transaction that events may be written in.
///
/// It is a transaction by its type, so that a write outside of one does not compile. Implemented for [`Transaction`]
/// and for the transactions of sqlx.
pub trait InTransaction<S: Store>: Send {
    /// The connection on which statements of this transaction run.
    fn connection(&mut self) -> &mut S::Connection;

    /// The transaction, if an outbox began it: then the outbox sees its end.
    fn begun_by_outbox(&mut self) -> Option<&mut Transaction<S>>;
}
