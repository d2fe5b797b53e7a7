//! The HTTP surface of Posthaste: REST in front of the hub, health and metrics beside it.
//!
//! Handlers translate and nothing else: a request becomes one call of the hub, an error becomes one problem document
//! ([RFC 9457](https://www.rfc-editor.org/rfc/rfc9457)) with a stable code.

mod dead_letters;
mod events;
mod extract;
mod health;
mod host;
mod paging;
mod problem;
mod registry;
mod router;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::ListenerExt;
use metrics_exporter_prometheus::PrometheusHandle;
use posthaste_hub::Hub;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub use problem::Code;

/// How long requests may still take after a stop.
const LAST_REQUESTS: Duration = Duration::from_secs(10);

/// Answers requests until `stop`, then finishes those that are under way.
pub async fn serve(
    listener: TcpListener,
    hub: Arc<Hub>,
    metrics: PrometheusHandle,
    stop: CancellationToken,
) -> io::Result<()> {
    let listener = listener.tap_io(|connection| {
        // An answer is one small write; waiting for more to send would only delay it.
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "a connection keeps its delay");
        }
    });
    let stopping = stop.clone();
    let serving = axum::serve(listener, router::router(hub, metrics))
        .with_graceful_shutdown(async move { stopping.cancelled().await });
    let too_late = async {
        stop.cancelled().await;
        tokio::time::sleep(LAST_REQUESTS).await;
    };
    tokio::select! {
        served = serving => served,
        () = too_late => {
            tracing::warn!("requests are still under way and are cut off");
            Ok(())
        }
    }
}
