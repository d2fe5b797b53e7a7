use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::router::App;

/// The process runs.
pub(crate) async fn process() -> Response {
    axum::Json(json!({ "status": "ok" })).into_response()
}

/// What it needs answers, too.
pub(crate) async fn dependencies(State(app): State<App>) -> Response {
    match app.hub.check_database().await {
        Ok(()) => axum::Json(json!({ "status": "ok", "database": "ok" })).into_response(),
        Err(error) => {
            let body = json!({ "status": "unavailable", "database": error.chain() });
            (StatusCode::SERVICE_UNAVAILABLE, axum::Json(body)).into_response()
        }
    }
}

pub(crate) async fn metrics(State(app): State<App>) -> Response {
    // Depths are read when somebody looks; everything else is counted as it happens.
    if let Err(error) = app.hub.measure_depths().await {
        tracing::warn!(error = error.chain(), "depths could not be measured");
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.metrics.render()).into_response()
}
