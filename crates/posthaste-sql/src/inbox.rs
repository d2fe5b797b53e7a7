//! What the inbox has in common in every database.

/// The public methods of an `Inbox`, given a driver's `record` and `delete_old`.
macro_rules! inbox_methods {
    ($store:ty) => {
        /// Records that this listener has processed this event, in the transaction of what it does about it. Returns true if
        /// the event was not processed before. While another transaction is about to record the same, it waits for the end of
        /// that one.
        pub async fn first_time(
            &self,
            transaction: &mut impl posthaste_core::outbox::InTransaction<$store>,
            listener: &str,
            event_id: &str,
        ) -> Result<bool, posthaste_core::StoreError> {
            self.record(transaction.connection(), listener, event_id).await
        }

        /// Forgets at most `limit` events that are older than any duplicate that may still come. Returns how many.
        pub async fn purge(
            &self,
            older_than: std::time::Duration,
            limit: u32,
        ) -> Result<u64, posthaste_core::StoreError> {
            self.delete_old(older_than, limit).await
        }
    };
}
pub(crate) use inbox_methods;
