use async_trait::async_trait;
use posthaste_core::outbox::Notifier;
use posthaste_core::{StoreError, Wakeup};
use sqlx::postgres::{PgListener, PgPoolOptions};

use super::OutboxStore;
use crate::postgres::errors::doing;

impl OutboxStore {
    /// The channel of LISTEN and NOTIFY.
    fn channel(&self) -> String {
        format!("posthaste_{}", self.table.to_lowercase())
    }
}

#[async_trait]
impl Notifier for OutboxStore {
    async fn notify(&self) -> Result<(), StoreError> {
        let notify = async {
            sqlx::query("SELECT pg_notify($1, '')").bind(self.channel()).execute(&self.pool).await?;
            Ok(())
        };
        doing("notify other processes", notify).await
    }

    async fn listen(&self, wakeup: Wakeup) -> Result<(), StoreError> {
        let listen = async {
            // A connection of its own, because one that listens all the time would be missing from the pool of the
            // service.
            let pool = PgPoolOptions::new().max_connections(1).max_lifetime(None).idle_timeout(None);
            let pool = pool.connect_lazy_with((*self.pool.connect_options()).clone());
            let mut listener = PgListener::connect_with(&pool).await?;
            listener.listen(&self.channel()).await?;
            loop {
                // Also before the first notification: earlier notifications were missed.
                wakeup.wake();
                // `None` means that the connection was lost and opened again: notifications may have been missed
                // meanwhile.
                listener.try_recv().await?;
            }
        };
        doing("listen for other processes", listen).await
    }
}
