//! LISTEN and NOTIFY. A notification is never part of a transaction that writes: its commit would take a lock that all
//! notifying transactions of the server share.

use posthaste_core::StoreError;
use sqlx::PgPool;
use sqlx::postgres::{PgListener, PgPoolOptions};

use super::errors::doing;

/// Notifies the processes that listen. Binds: the channel, the payload.
pub(super) const NOTIFY: &str = "SELECT pg_notify($1, $2)";

/// Calls `notified` with the payload of each notification on this channel. It calls it with `None` when it begins to
/// listen, and when notifications may have been lost.
pub(super) async fn listen(
    pool: &PgPool,
    channel: &str,
    notified: impl Fn(Option<&str>) + Send,
) -> Result<(), StoreError> {
    let listen = async {
        // A connection of its own, because one that listens all the time would be missing from the pool of the service.
        let own = PgPoolOptions::new().max_connections(1).max_lifetime(None).idle_timeout(None);
        let own = own.connect_lazy_with((*pool.connect_options()).clone());
        let mut listener = PgListener::connect_with(&own).await?;
        listener.listen(channel).await?;
        // Earlier notifications were missed.
        notified(None);
        loop {
            // `None` means that the connection was lost and opened again: notifications may have been missed meanwhile.
            let notification = listener.try_recv().await?;
            notified(notification.as_ref().map(|notification| notification.payload()));
        }
    };
    doing("listen for other processes", listen).await
}
