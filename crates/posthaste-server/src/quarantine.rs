use axum::extract::State;
use posthaste_api::{
    FieldError, Input, QuarantineDiscardIn, QuarantinePage, QuarantineReplayIn, QuarantineResults, QuarantinedDetail,
    read_time,
};
use posthaste_hub::{QuarantineCursor, QuarantineFilter, QuarantineStatus};
use serde::Deserialize;

use crate::extract::{Body, Params, Segment, id};
use crate::paging;
use crate::problem::ErrorResponse;
use crate::router::App;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListParams {
    group: Option<String>,
    topic: Option<String>,
    status: Option<String>,
    from: Option<String>,
    to: Option<String>,
    size: Option<u32>,
    cursor: Option<String>,
}

/// Which records to list.
pub(crate) struct List {
    filter: QuarantineFilter,
    after: Option<QuarantineCursor>,
    size: u32,
}

impl Input for ListParams {
    type Checked = List;

    fn validate(self) -> Result<List, Vec<FieldError>> {
        let mut errors = Vec::new();
        let request = paging::page_request(None, self.size, self.cursor, &mut errors);
        let status = match self.status.as_deref().map(str::to_ascii_uppercase).as_deref() {
            None | Some("QUARANTINED") => Some(QuarantineStatus::Quarantined),
            Some("REPLAYED") => Some(QuarantineStatus::Replayed),
            Some("DISCARDED") => Some(QuarantineStatus::Discarded),
            Some("ALL") => None,
            Some(_) => {
                errors.push(FieldError::new("status", "is none of QUARANTINED, REPLAYED, DISCARDED, ALL"));
                None
            }
        };
        let (from, to) = (read_time("from", self.from, &mut errors), read_time("to", self.to, &mut errors));
        let after = request.after.map(|text| text.parse::<QuarantineCursor>());
        if let Some(Err(error)) = &after {
            errors.push(FieldError::new("cursor", error.to_string()));
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        let filter = QuarantineFilter { group: self.group, topic: self.topic, status, from, to };
        Ok(List { filter, after: after.and_then(Result::ok), size: request.size })
    }
}

pub(crate) async fn list(
    State(app): State<App>,
    Params(List { filter, after, size }): Params<ListParams>,
) -> Result<axum::Json<QuarantinePage>, ErrorResponse> {
    Ok(axum::Json(app.hub.quarantine(&filter, after.as_ref(), size).await?))
}

pub(crate) async fn get(
    State(app): State<App>,
    Segment(path): Segment,
) -> Result<axum::Json<QuarantinedDetail>, ErrorResponse> {
    let detail = app.hub.quarantined(id(&path, "quarantined record")?).await?;
    detail.map(axum::Json).ok_or_else(|| ErrorResponse::not_found("quarantined record"))
}

pub(crate) async fn replay(
    State(app): State<App>,
    Body(replay): Body<QuarantineReplayIn>,
) -> Result<axum::Json<QuarantineResults>, ErrorResponse> {
    Ok(axum::Json(app.hub.replay_quarantined(&replay).await?))
}

pub(crate) async fn discard(
    State(app): State<App>,
    Body(discard): Body<QuarantineDiscardIn>,
) -> Result<axum::Json<QuarantineResults>, ErrorResponse> {
    Ok(axum::Json(app.hub.discard_quarantined(&discard).await?))
}
