use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use posthaste_api::{DeadLetterDetail, DeadLetterPage, Domain, FieldError, Input, ReplayIn, read_time};
use posthaste_hub::{DeadLetterCursor, DeadLetterFilter, DeadLetterSort, DeadLetterStatus};
use serde::Deserialize;

use crate::extract::{Body, Params, Segment, id};
use crate::paging;
use crate::problem::ErrorResponse;
use crate::router::App;

/// How long a caller may wait for the results of a replay.
const MAX_WAIT: Duration = Duration::from_secs(60);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct ListParams {
    message_id: Option<String>,
    subscriber_id: Option<String>,
    error: Option<String>,
    from: Option<String>,
    to: Option<String>,
    status: Option<String>,
    domain: Option<String>,
    event_type: Option<String>,
    q: Option<String>,
    sort: Option<String>,
    page: Option<u32>,
    size: Option<u32>,
    cursor: Option<String>,
}

pub(crate) async fn list(
    State(app): State<App>,
    Params(filter): Params<ListParams>,
) -> Result<axum::Json<DeadLetterPage>, ErrorResponse> {
    Ok(axum::Json(app.hub.dead_letters(&filter).await?))
}

impl Input for ListParams {
    type Checked = DeadLetterFilter;

    fn validate(self) -> Result<DeadLetterFilter, Vec<FieldError>> {
        let mut errors = Vec::new();
        let request = paging::page_request(self.page, self.size, self.cursor, &mut errors);
        let status = match self.status.as_deref().map(str::to_ascii_uppercase).as_deref() {
            None | Some("FAILED") => Some(DeadLetterStatus::Failed),
            Some("NEW") => Some(DeadLetterStatus::New),
            Some("PROCESSED") => Some(DeadLetterStatus::Processed),
            Some("ALL") => None,
            Some(_) => {
                errors.push(FieldError::new("status", "is none of NEW, FAILED, PROCESSED, ALL"));
                None
            }
        };
        let domain = self.domain.map(|domain| domain.parse::<Domain>());
        if let Some(Err(error)) = &domain {
            errors.push(FieldError::new("domain", error.to_string()));
        }
        let (from, to) = (read_time("from", self.from, &mut errors), read_time("to", self.to, &mut errors));
        let sort = self.sort.map_or(Ok(DeadLetterFilter::default().sort), |sort| sort.parse::<DeadLetterSort>());
        if let Err(error) = &sort {
            errors.push(FieldError::new("sort", error.to_string()));
        }
        let sort = sort.unwrap_or(DeadLetterFilter::default().sort);
        let cursor = request.after.map(|text| text.parse::<DeadLetterCursor>());
        match &cursor {
            Some(Err(error)) => errors.push(FieldError::new("cursor", error.to_string())),
            Some(Ok(cursor)) if cursor.sort != sort => {
                let why = format!("belongs to the order {}: give sort as for the first page", cursor.sort);
                errors.push(FieldError::new("cursor", why));
            }
            _ => {}
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        Ok(DeadLetterFilter {
            message_id: self.message_id,
            subscriber_id: self.subscriber_id,
            error: self.error,
            from,
            to,
            status,
            domain: domain.and_then(Result::ok).map(|domain| domain.to_string()),
            event_type: self.event_type,
            q: self.q,
            sort,
            cursor: cursor.and_then(Result::ok),
            page: request.page,
            size: request.size,
        })
    }
}

pub(crate) async fn get(
    State(app): State<App>,
    Segment(path): Segment,
) -> Result<axum::Json<DeadLetterDetail>, ErrorResponse> {
    let detail = app.hub.dead_letter(id(&path, "dead letter")?).await?;
    detail.map(axum::Json).ok_or_else(|| ErrorResponse::not_found("dead letter"))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReplayParams {
    wait: Option<u64>,
}

impl Input for ReplayParams {
    type Checked = Option<Duration>;

    fn validate(self) -> Result<Option<Duration>, Vec<FieldError>> {
        Ok(self.wait.map(|seconds| Duration::from_secs(seconds).min(MAX_WAIT)))
    }
}

/// 202 at once, or with `wait` 200 and the result for each dead letter.
pub(crate) async fn replay(
    State(app): State<App>,
    Params(wait): Params<ReplayParams>,
    Body(replay): Body<ReplayIn>,
) -> Result<Response, ErrorResponse> {
    let answer = app.hub.replay(&replay.ids, replay.reason, wait).await?;
    let status = if wait.is_some() { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, axum::Json(answer)).into_response())
}
