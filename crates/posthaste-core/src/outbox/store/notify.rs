use async_trait::async_trait;

use crate::{StoreError, Wakeup};

/// Notifies other processes of commits, through the database. Notifications are hints: without them, or when one is
/// lost, the table is polled.
#[async_trait]
pub trait Notifier: Send + Sync {
    /// Notifies the processes that listen. Never part of a transaction of the service.
    async fn notify(&self) -> Result<(), StoreError>;

    /// Wakes once when it begins to listen, and then whenever another process notifies, until the future is dropped. An
    /// error means that notifications were lost.
    async fn listen(&self, wakeup: Wakeup) -> Result<(), StoreError>;
}
