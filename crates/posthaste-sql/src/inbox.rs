//! The parts of the inbox that all databases share.

/// The public methods of an `Inbox`, given a driver's `record` and `delete_old`.
macro_rules! inbox_methods {
    ($store:ty) => {
        /// Records that this listener has processed this event, in the same transaction as the listener's own changes.
        /// Returns true if the listener has not processed the event before. If another open transaction has recorded
        /// the same event, this waits for the end of that transaction.
        pub async fn first_time(
            &self,
            transaction: &mut impl posthaste_core::outbox::InTransaction<$store>,
            listener: &str,
            event_id: &str,
        ) -> Result<bool, posthaste_core::StoreError> {
            self.record(transaction.connection(), listener, event_id).await
        }

        /// Deletes at most `limit` events that were recorded longer than `older_than` ago, and returns how many. Choose
        /// an age at which no duplicate can arrive any more.
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
