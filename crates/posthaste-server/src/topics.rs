use axum::extract::State;
use posthaste_api::{ResetIn, ResetOut, TopicList};

use crate::extract::Body;
use crate::problem::{Code, ErrorResponse};
use crate::router::App;

pub(crate) async fn list(State(app): State<App>) -> Result<axum::Json<TopicList>, ErrorResponse> {
    Ok(axum::Json(app.hub.topics().await?))
}

pub(crate) async fn reset(
    State(app): State<App>,
    Body(reset): Body<ResetIn>,
) -> Result<axum::Json<ResetOut>, ErrorResponse> {
    match app.hub.reset_position(&reset).await? {
        0 => {
            let detail = "the group does not read this partition: GET /api/topics or `posthaste topics lag` shows which \
                          groups read which topics";
            Err(ErrorResponse::of(Code::NotFound, detail))
        }
        partitions => Ok(axum::Json(ResetOut { partitions })),
    }
}
