use std::sync::Arc;

use posthaste_core::hub_store::Registry;
use posthaste_core::{FaultKind, StoreError};
use tokio::sync::Mutex;

mod filtered;
mod index;
mod key;
mod payload;

pub use index::{ActiveSubscription, SubscriptionIndex};

/// Finds the active subscriptions that match an event.
///
/// It is never stale: every batch first compares the version of the registry, which costs one small read. So an event
/// that is accepted after the response 201 to a new subscription always reaches that subscription.
pub(crate) struct SubscriptionMatcher {
    registry: Arc<dyn Registry>,
    loaded: Mutex<Loaded>,
}

/// The index of the active subscriptions, and the version of the registry that it was made from.
#[derive(Default)]
struct Loaded {
    version: Option<i64>,
    index: Arc<SubscriptionIndex>,
}

impl SubscriptionMatcher {
    pub(crate) fn new(registry: Arc<dyn Registry>) -> Self {
        Self { registry, loaded: Mutex::default() }
    }

    /// The current active subscriptions.
    pub(crate) async fn current(&self) -> Result<Arc<SubscriptionIndex>, StoreError> {
        let mut loaded = self.loaded.lock().await;
        if loaded.version != Some(self.registry.version().await?) {
            let (version, active) = self.registry.load_active().await?;
            // A large index takes a while: other tasks must not wait for this thread.
            let index = tokio::task::spawn_blocking(|| Arc::new(SubscriptionIndex::new(active)));
            let failed = |error| StoreError::new("index the active subscriptions", FaultKind::Transient, error);
            let index = index.await.map_err(failed)?;
            *loaded = Loaded { version: Some(version), index };
        }
        Ok(loaded.index.clone())
    }
}

#[cfg(test)]
mod tests;
