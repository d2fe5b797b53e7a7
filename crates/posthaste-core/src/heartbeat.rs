//! A dedicated thread for work that must not wait for listeners.
//!
//! A listener that blocks its thread, or a service that keeps all threads of its runtime busy, delays every task of
//! that runtime. Leases that are renewed late are lost, and their events are delivered twice. So renewals run on a
//! runtime with one thread that runs nothing else.

use std::sync::Mutex;
use std::time::Duration;

use tokio::runtime::{Builder, Handle};

use crate::lock;

/// The runtime of that thread. The first call starts it, and it lives as long as the process.
///
/// If the thread cannot be started, this returns the caller's own runtime: renewals then run beside everything else.
///
/// # Panics
/// If the thread cannot be started and the caller is outside of a runtime.
pub fn runtime() -> Handle {
    static RUNTIME: Mutex<Option<Handle>> = Mutex::new(None);
    let mut runtime = lock(&RUNTIME);
    if let Some(runtime) = &*runtime {
        return runtime.clone();
    }
    match start() {
        Ok(handle) => runtime.insert(handle).clone(),
        Err(error) => {
            tracing::warn!(%error, "failed to start the renewal thread: listeners that block may delay renewals");
            Handle::current()
        }
    }
}

fn start() -> std::io::Result<Handle> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    let run = move || runtime.block_on(std::future::pending::<()>());
    std::thread::Builder::new().name("posthaste-renew".to_owned()).spawn(run)?;
    Ok(handle)
}

/// Runs a task on that thread, to its end even if the caller is cancelled. Returns `None` if the task panicked.
pub async fn run<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> Option<T> {
    // The thread lives as long as the process, so only a panic of the task can make this fail.
    runtime().spawn(task).await.ok()
}

/// How long a statement may take before its connection is given up: long enough for a busy server, short enough that
/// another attempt can still renew the lease.
pub fn statement_timeout(lease: Duration) -> Duration {
    (lease / 3).max(Duration::from_secs(1))
}
