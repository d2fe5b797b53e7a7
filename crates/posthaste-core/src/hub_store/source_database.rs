use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::HubOutbox;
use crate::outbox::OpenError;

/// The database of a service, with an outbox table that a hub reads: a source.
///
/// The service owns the table. A hub changes only rows, unless an operator asks it to [`migrate`](Self::migrate).
#[async_trait]
pub trait SourceDatabase: Send + Sync + 'static {
    /// Connects once. Fails with the reason why the database cannot be reached.
    async fn check(&self) -> Result<(), OpenError>;

    /// Connects, checks that the table is up to date, and opens it for channels.
    async fn open(&self, lease: Duration) -> Result<Arc<dyn HubOutbox>, OpenError>;

    /// Connects, and fails as [`open`](Self::open) would. Changes no row. Returns how many rows are pending, counted up to
    /// `limit`.
    async fn count_pending(&self, lease: Duration, limit: usize) -> Result<u64, OpenError>;

    /// Connects, and creates the table or brings it up to date.
    async fn migrate(&self) -> Result<(), OpenError>;

    /// Closes the connections.
    async fn close(&self);
}
