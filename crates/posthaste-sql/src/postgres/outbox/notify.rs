use async_trait::async_trait;
use posthaste_core::outbox::Notifier;
use posthaste_core::{StoreError, Wakeup};

use super::OutboxStore;
use crate::postgres::errors::doing;
use crate::postgres::notify;

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
            sqlx::query(notify::NOTIFY).bind(self.channel()).bind("").execute(&self.pool).await?;
            Ok(())
        };
        doing("notify other processes", notify).await
    }

    async fn listen(&self, wakeup: Wakeup) -> Result<(), StoreError> {
        notify::listen(&self.pool, &self.channel(), |_| wakeup.wake()).await
    }
}
