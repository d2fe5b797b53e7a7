use std::future::Future;
use std::sync::{Arc, Mutex};

use posthaste_core::{Relay, RelayOptions, Sink, Source};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// The relays that run in this process, and the way to stop them.
#[derive(Clone, Default)]
pub(crate) struct Relays {
    stop: CancellationToken,
    running: Arc<Mutex<JoinSet<()>>>,
}

impl Relays {
    /// Starts one more instance of the engine.
    pub(crate) fn start<S, K>(&self, name: impl Into<String>, source: S, sink: K, options: RelayOptions)
    where
        S: Source,
        K: Sink<Item = S::Item>,
    {
        self.spawn(Relay::new(name, Arc::new(source), Arc::new(sink), options).run(self.stop.clone()));
    }

    /// Runs something beside the relays that ends with them.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.running.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).spawn(task);
    }

    pub(crate) fn stopping(&self) -> &CancellationToken {
        &self.stop
    }

    /// Stops all of them at the same time and waits until each has drained.
    pub(crate) async fn stop(&self) {
        self.stop.cancel();
        let mut running = std::mem::take(&mut *self.running.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        while let Some(ended) = running.join_next().await {
            if let Err(error) = ended {
                tracing::error!(%error, "a relay ended by a panic");
            }
        }
    }
}
