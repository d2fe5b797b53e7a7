use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::outbox::{OutboxItem, OutboxRow, Store, Table};
use crate::{Source, StoreError};

/// The outbox of a hub: one source for each event type.
///
/// A [`Table`] that was opened for channels, without the type parameter of its store.
#[async_trait]
pub trait HubOutbox: Send + Sync + 'static {
    /// The source of the events of one type.
    fn source(&self, event_type: &str) -> Arc<dyn Source<Item = OutboxItem>>;

    /// Wakes the source of this type, so that it claims now.
    fn wake(&self, event_type: &str);

    /// Event types with rows that are due.
    async fn pending_types(&self) -> Result<Vec<String>, StoreError>;

    /// The row of one event.
    async fn find(&self, event_id: &str) -> Result<Option<OutboxRow>, StoreError>;

    /// Event types with rows that are due, and for how long the first row of each has been due.
    async fn oldest_due_by_type(&self) -> Result<Vec<(String, Duration)>, StoreError>;
}

#[async_trait]
impl<S: Store> HubOutbox for Table<S> {
    fn source(&self, event_type: &str) -> Arc<dyn Source<Item = OutboxItem>> {
        Arc::new(self.channel_source(event_type))
    }

    fn wake(&self, event_type: &str) {
        Table::wake(self, event_type);
    }

    async fn pending_types(&self) -> Result<Vec<String>, StoreError> {
        Table::pending_types(self).await
    }

    async fn find(&self, event_id: &str) -> Result<Option<OutboxRow>, StoreError> {
        self.store().find(event_id).await
    }

    async fn oldest_due_by_type(&self) -> Result<Vec<(String, Duration)>, StoreError> {
        self.store().oldest_due_by_type().await
    }
}
