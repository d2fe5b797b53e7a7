use axum::extract::State;
use posthaste_api::{ChannelList, ChannelOut, SourceList};

use crate::extract::Segment;
use crate::problem::{Code, ErrorResponse};
use crate::router::App;

pub(crate) async fn list(State(app): State<App>) -> Result<axum::Json<ChannelList>, ErrorResponse> {
    Ok(axum::Json(app.hub.channel_list().await?))
}

pub(crate) async fn pause(
    State(app): State<App>,
    Segment(event_type): Segment,
) -> Result<axum::Json<ChannelOut>, ErrorResponse> {
    set_paused(&app, &event_type, true).await
}

pub(crate) async fn resume(
    State(app): State<App>,
    Segment(event_type): Segment,
) -> Result<axum::Json<ChannelOut>, ErrorResponse> {
    set_paused(&app, &event_type, false).await
}

async fn set_paused(app: &App, event_type: &str, is_paused: bool) -> Result<axum::Json<ChannelOut>, ErrorResponse> {
    let not_found = || {
        let detail = "there is no channel of this event type: `posthaste channels list` (GET /api/channels) lists them";
        ErrorResponse::of(Code::NotFound, detail)
    };
    app.hub.pause_channel(event_type, is_paused).await?.map(axum::Json).ok_or_else(not_found)
}

pub(crate) async fn sources(State(app): State<App>) -> axum::Json<SourceList> {
    axum::Json(app.hub.source_list().await)
}
