//! The HTTP interface of Posthaste: the REST API of the hub, the built-in Schema Registry, health checks and metrics.
//!
//! Handlers only translate: a request becomes one call of the hub, and an error becomes one problem document
//! ([RFC 9457](https://www.rfc-editor.org/rfc/rfc9457)) with a stable code.

mod channels;
mod connections;
mod dead_letters;
mod events;
mod extract;
mod health;
mod host;
mod paging;
mod problem;
mod quarantine;
mod registry;
mod router;
mod schema_registry;
mod topics;
mod write_timeout;

use std::sync::Arc;

use metrics_exporter_prometheus::PrometheusHandle;
use posthaste_hub::Hub;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub use connections::ClientLimits;
pub use problem::Code;

/// Serves requests until `stop`, then finishes those that are running.
pub async fn serve(
    listener: TcpListener,
    hub: Arc<Hub>,
    metrics: PrometheusHandle,
    limits: ClientLimits,
    stop: CancellationToken,
) {
    connections::serve(listener, router::router(hub, metrics, limits), limits, stop).await;
}
