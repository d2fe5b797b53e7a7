use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use posthaste_hub::PartStatus;
use serde_json::{Map, Value, json};

use crate::router::App;

/// Reports that the process runs.
pub(crate) async fn process() -> Response {
    axum::Json(json!({ "status": "ok" })).into_response()
}

/// Reports the readiness of each part. The status is 503 if a part is not ready.
pub(crate) async fn readiness(State(app): State<App>) -> Response {
    let readiness = app.hub.readiness().await;
    let part = |status: &PartStatus| match status {
        PartStatus::Ready => json!({ "status": "ready" }),
        PartStatus::Degraded(reason) => json!({ "status": "degraded", "detail": reason }),
        PartStatus::Unready(reason) => json!({ "status": "unready", "detail": reason }),
    };
    let parts: Map<String, Value> = readiness.parts.iter().map(|(name, status)| (name.clone(), part(status))).collect();
    let (code, status) = match (readiness.is_ready(), readiness.is_degraded()) {
        (true, false) => (StatusCode::OK, "ready"),
        (true, true) => (StatusCode::OK, "degraded"),
        (false, _) => (StatusCode::SERVICE_UNAVAILABLE, "unready"),
    };
    (code, axum::Json(json!({ "status": status, "parts": parts }))).into_response()
}

pub(crate) async fn metrics(State(app): State<App>) -> Response {
    // Depths and lag are measured at each request; everything else is counted as it happens.
    if let Err(error) = app.hub.measure_depths().await {
        tracing::warn!(error = error.chain(), "failed to measure depths");
    }
    if let Err(error) = app.hub.measure_backlogs().await {
        tracing::warn!(error = error.chain(), "failed to measure the backlogs");
    }
    if let Err(error) = app.hub.measure_lag().await {
        tracing::warn!(error = error.chain(), "failed to measure the lag");
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.metrics.render()).into_response()
}
