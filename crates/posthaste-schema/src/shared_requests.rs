use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use posthaste_core::lock;

use crate::registry::RegistryError;

type Running<T> = Shared<BoxFuture<'static, Result<T, RegistryError>>>;

/// Requests that are under way. Callers that ask for the same thing at the same time share one request, and its failure.
pub(crate) struct SharedRequests<K, T: Clone> {
    running: Arc<Mutex<HashMap<K, Running<T>>>>,
}

impl<K, T: Clone> Default for SharedRequests<K, T> {
    fn default() -> Self {
        Self { running: Arc::default() }
    }
}

impl<K: Clone + Eq + Hash + Send + 'static, T: Clone + Send + Sync + 'static> SharedRequests<K, T> {
    /// Waits for the request with this key. If there is none, starts `request`, which must store its result before it
    /// ends: otherwise a caller that comes then asks again.
    pub(crate) async fn run(
        &self,
        key: K,
        request: impl Future<Output = Result<T, RegistryError>> + Send + 'static,
    ) -> Result<T, RegistryError> {
        let running = {
            let mut all = lock(&self.running);
            let (done, done_key) = (self.running.clone(), key.clone());
            let start = || {
                let request = async move {
                    let result = request.await;
                    lock(&done).remove(&done_key);
                    result
                };
                request.boxed().shared()
            };
            all.entry(key).or_insert_with(start).clone()
        };
        running.await
    }
}
