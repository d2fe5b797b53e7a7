use std::sync::Arc;
use std::time::Duration;

use posthaste_core::StoreError;
use posthaste_core::hub_store::BusInspector;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// Expired records are removed this often during their retention, within these limits.
const ROUNDS: u32 = 10;
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// Removes expired records of the built-in bus until the hub stops.
pub(crate) async fn remove_expired(inspector: Arc<dyn BusInspector>, retention: Duration, stopping: CancellationToken) {
    let pause = (retention / ROUNDS).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
    loop {
        tokio::select! {
            biased;
            () = stopping.cancelled() => return,
            () = sleep(pause) => {}
        }
        if let Err(error) = remove_all(&*inspector, retention, &stopping).await {
            tracing::warn!(error = error.chain(), "failed to remove expired records of the bus; trying again later");
        }
    }
}

async fn remove_all(
    inspector: &dyn BusInspector,
    retention: Duration,
    stopping: &CancellationToken,
) -> Result<(), StoreError> {
    let mut removed = 0;
    while !stopping.is_cancelled() {
        match inspector.remove_expired(retention).await? {
            0 => break,
            some => removed += some,
        }
    }
    if removed > 0 {
        tracing::debug!(removed, "removed expired records of the bus");
    }
    Ok(())
}
