use std::sync::Arc;

use axum::http::Uri;
use axum::middleware::from_fn;
use axum::routing::{get, post};
use axum::{Extension, Router};
use metrics_exporter_prometheus::PrometheusHandle;
use posthaste_hub::{Hub, Role, Roles};

use crate::connections::ClientLimits;
use crate::extract::{BodyTimeout, MaxBody};
use crate::problem::{Code, ErrorResponse};
use crate::{channels, dead_letters, events, health, host, quarantine, registry, schema_registry, topics};

/// Enough for one event with the largest payload in base64 and the largest headers.
const MAX_EVENT_BODY: usize = 2 * 1024 * 1024;
const MAX_BATCH_BODY: usize = 16 * 1024 * 1024;
/// Enough for all other requests. A replay of 10,000 ids has 400 KB.
const MAX_BODY: usize = 512 * 1024;

/// The state that handlers share.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) hub: Arc<Hub>,
    pub(crate) metrics: PrometheusHandle,
}

pub(crate) fn router(hub: Arc<Hub>, metrics: PrometheusHandle, limits: ClientLimits) -> Router {
    let limited = |limit| Extension(MaxBody(limit));
    let schemas = schema_registry::router(hub.builtin_registry().clone());
    let roles = hub.roles().clone();
    let mut router = Router::new();
    if roles.has(Role::Ingest) {
        router = router
            .route("/api/events", post(events::publish).layer(limited(MAX_EVENT_BODY)))
            .route("/api/events/batch", post(events::publish_batch).layer(limited(MAX_BATCH_BODY)));
    }
    if roles.has(Role::Api) {
        router = router.nest_service("/registry", schemas).merge(operators());
    }
    router
        .route("/healthz", get(health::process))
        .route("/readyz", get(health::readiness))
        .route("/metrics", get(health::metrics))
        .fallback(async move |uri: Uri| not_found(&roles, uri.path()))
        .method_not_allowed_fallback(async || {
            ErrorResponse::of(Code::MethodNotAllowed, "this path does not support this method")
        })
        .layer(limited(MAX_BODY))
        .layer(Extension(BodyTimeout(limits.body_timeout)))
        .layer(from_fn(host::refuse_foreign))
        .with_state(App { hub, metrics })
}

/// What operators use.
fn operators() -> Router<App> {
    Router::new()
        .route("/api/events/{id}", get(events::trace))
        .route("/api/event-definitions", get(registry::list_definitions).post(registry::create_definition))
        .route(
            "/api/event-definitions/{id}",
            get(registry::get_definition).put(registry::update_definition).delete(registry::delete_definition),
        )
        .route("/api/subscriptions", get(registry::list_subscriptions).post(registry::create_subscription))
        .route(
            "/api/subscriptions/{id}",
            get(registry::get_subscription).put(registry::update_subscription).delete(registry::delete_subscription),
        )
        .route("/api/dlt-messages", get(dead_letters::list))
        .route("/api/dlt-messages/{id}", get(dead_letters::get))
        .route("/api/replay", post(dead_letters::replay))
        .route("/api/topics", get(topics::list))
        .route("/api/topics/reset", post(topics::reset))
        .route("/api/topics/{topic}/records", get(topics::records))
        .route("/api/channels", get(channels::list))
        .route("/api/channels/{type}/pause", post(channels::pause))
        .route("/api/channels/{type}/resume", post(channels::resume))
        .route("/api/sources", get(channels::sources))
        .route("/api/quarantine", get(quarantine::list))
        .route("/api/quarantine/{id}", get(quarantine::get))
        .route("/api/quarantine/replay", post(quarantine::replay))
        .route("/api/quarantine/discard", post(quarantine::discard))
        // The older paths of the dead-letter service.
        .route("/dlt-messages", get(dead_letters::list))
        .route("/dlt-messages/{id}", get(dead_letters::get))
        .route("/replay", post(dead_letters::replay))
}

fn not_found(roles: &Roles, path: &str) -> ErrorResponse {
    let is_complete = roles.has(Role::Ingest) && roles.has(Role::Api);
    let detail = match path.starts_with("/api/") && !is_complete {
        true => format!("this server runs only the roles {roles}: ask one that also runs ingest or api"),
        false => "there is nothing at this path".to_owned(),
    };
    ErrorResponse::of(Code::NotFound, detail)
}
