use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::outbox::{OutboxItem, OutboxRow, Purge, Store, Table};
use crate::{Disposition, Failure, Settled, Settlement, Source, StoreError};

/// The outbox of a hub: one source for each event type.
///
/// A [`Table`] that was opened for channels, without the type parameter of its store.
///
/// # Laws
///
/// Each is a test of that name in `posthaste-backend-tests` (`hub_laws`).
///
/// - `only_done_rows_are_removed_by_their_age`.
/// - `rows_are_removed_once_by_several_processes`.
/// - `the_id_of_a_removed_row_is_new_again`.
#[async_trait]
pub trait HubOutbox: Send + Sync + 'static {
    /// True if the order of an aggregate is kept. Then all types have one source, and the type given to `source` and
    /// `wake` does not matter.
    fn is_ordered(&self) -> bool;

    /// The source of the events of one type.
    fn source(&self, event_type: &str) -> Arc<dyn Source<Item = OutboxItem>>;

    /// Makes due rows of this type DEAD, at most `limit`, because nothing will ever publish them. Rows that another process
    /// has claimed are left to it. Returns how many. No source of this type may be open in this process.
    async fn give_up(&self, event_type: &str, failure: &Failure, limit: usize) -> Result<usize, StoreError>;

    /// Wakes the source of this type, so that it claims now.
    fn wake(&self, event_type: &str);

    /// The row of one event.
    async fn find(&self, event_id: &str) -> Result<Option<OutboxRow>, StoreError>;

    /// Event types with rows that are due, and for how long the first row of each has been due.
    async fn oldest_due_by_type(&self) -> Result<Vec<(String, Duration)>, StoreError>;

    /// Of an ordered table: for how long the oldest due row that waits for no other row has been due.
    async fn oldest_unblocked(&self) -> Result<Option<Duration>, StoreError>;

    /// How many rows are pending, counted up to `limit`.
    async fn count_pending(&self, limit: usize) -> Result<u64, StoreError>;

    /// Removes the first rows that were published longer than this ago, at most `limit`, in one short transaction.
    /// Returns how many; 0 if there are none left. Pending and DEAD rows are kept, and rows that another process is
    /// removing are left to it.
    async fn remove_done(&self, older_than: Duration, limit: usize) -> Result<u64, StoreError>;
}

#[async_trait]
impl<S: Store> HubOutbox for Table<S> {
    fn is_ordered(&self) -> bool {
        self.store().mode().is_ordered()
    }

    fn source(&self, event_type: &str) -> Arc<dyn Source<Item = OutboxItem>> {
        Arc::new(self.channel_source(event_type))
    }

    async fn give_up(&self, event_type: &str, failure: &Failure, limit: usize) -> Result<usize, StoreError> {
        let source = self.unshared_source(event_type);
        let given_up = async {
            let claimed = source.claim(limit).await?.items;
            let disposition = Disposition::Dead(failure.clone());
            let settlement = |claimed| Settlement { claimed, disposition: &disposition, took: Duration::ZERO };
            let settled = source.settle(&claimed.iter().map(settlement).collect::<Vec<_>>()).await;
            match settled {
                Ok(settled) => Ok(settled.into_iter().filter(|settled| *settled == Settled::Applied).count()),
                Err(error) => {
                    // Otherwise the rows would wait for the end of their lease.
                    let released = source.release(&claimed.iter().collect::<Vec<_>>()).await;
                    released.and(Err(error))
                }
            }
        };
        let given_up = given_up.await;
        source.close().await.and(given_up)
    }

    fn wake(&self, event_type: &str) {
        Table::wake(self, event_type);
    }

    async fn find(&self, event_id: &str) -> Result<Option<OutboxRow>, StoreError> {
        self.store().find(event_id).await
    }

    async fn oldest_due_by_type(&self) -> Result<Vec<(String, Duration)>, StoreError> {
        self.store().oldest_due_by_type().await
    }

    async fn oldest_unblocked(&self) -> Result<Option<Duration>, StoreError> {
        self.store().oldest_unblocked().await
    }

    async fn count_pending(&self, limit: usize) -> Result<u64, StoreError> {
        self.store().count_pending(limit).await
    }

    async fn remove_done(&self, older_than: Duration, limit: usize) -> Result<u64, StoreError> {
        self.store().purge(Purge::Done, older_than, limit).await
    }
}
