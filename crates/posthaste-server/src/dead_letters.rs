use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use posthaste_api::{DeadLetterDetail, DeadLetterPage, Domain, FieldError, ReplayIn};
use posthaste_hub::{LetterFilter, LetterSort, LetterSortKey, LetterStatus};
use serde::Deserialize;

use crate::extract::{Json, Params, id};
use crate::problem::Answer;
use crate::registry::page_request;
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
}

pub(crate) async fn list(
    State(app): State<App>,
    Params(params): Params<ListParams>,
) -> Result<axum::Json<DeadLetterPage>, Answer> {
    let request = page_request(params.page, params.size)?;
    let filter = filter(params, request.page, request.size).map_err(Answer::invalid)?;
    Ok(axum::Json(app.hub.dead_letters(&filter).await?))
}

fn filter(params: ListParams, page: u32, size: u32) -> Result<LetterFilter, Vec<FieldError>> {
    let mut errors = Vec::new();
    let status = match params.status.as_deref() {
        None | Some("FAILED") => Some(LetterStatus::Failed),
        Some("NEW") => Some(LetterStatus::New),
        Some("PROCESSED") => Some(LetterStatus::Processed),
        Some("ALL") => None,
        Some(_) => {
            errors.push(FieldError::new("status", "is none of NEW, FAILED, PROCESSED, ALL"));
            None
        }
    };
    let domain = params.domain.map(|domain| domain.parse::<Domain>());
    if let Some(Err(error)) = &domain {
        errors.push(FieldError::new("domain", error.to_string()));
    }
    let mut time = |field: &str, text: Option<String>| {
        let time = DateTime::parse_from_rfc3339(&text?);
        if time.is_err() {
            errors.push(FieldError::new(field, "is not a time such as 2026-01-31T12:00:00Z"));
        }
        time.ok().map(|time| time.with_timezone(&Utc))
    };
    let (from, to) = (time("from", params.from), time("to", params.to));
    let sort = params.sort.as_deref().map(sort);
    if let Some(None) = sort {
        errors
            .push(FieldError::new("sort", "is none of createdAt, updatedAt, retryCount, with - before for descending"));
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    Ok(LetterFilter {
        message_id: params.message_id,
        subscriber_id: params.subscriber_id,
        error: params.error,
        from,
        to,
        status,
        domain: domain.and_then(Result::ok).map(|domain| domain.to_string()),
        event_type: params.event_type,
        q: params.q,
        sort: sort.flatten().unwrap_or(LetterFilter::default().sort),
        page,
        size,
    })
}

fn sort(text: &str) -> Option<LetterSort> {
    let (descending, name) = match text.strip_prefix('-') {
        Some(name) => (true, name),
        None => (false, text),
    };
    let by = match name {
        "createdAt" => LetterSortKey::CreatedAt,
        "updatedAt" => LetterSortKey::UpdatedAt,
        "retryCount" => LetterSortKey::RetryCount,
        _ => return None,
    };
    Some(LetterSort { by, descending })
}

pub(crate) async fn get(
    State(app): State<App>,
    Path(path): Path<String>,
) -> Result<axum::Json<DeadLetterDetail>, Answer> {
    let detail = app.hub.dead_letter(id(&path, "dead letter")?).await?;
    detail.map(axum::Json).ok_or_else(|| Answer::not_found("dead letter"))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReplayParams {
    wait: Option<u64>,
}

/// 202 at once, or with `wait` 200 and what became of each.
pub(crate) async fn replay(
    State(app): State<App>,
    Params(params): Params<ReplayParams>,
    Json(replay): Json<ReplayIn>,
) -> Result<Response, Answer> {
    let replay = replay.validate().map_err(Answer::invalid)?;
    let wait = params.wait.map(|seconds| Duration::from_secs(seconds).min(MAX_WAIT));
    let answer = app.hub.replay(&replay.ids, replay.reason, wait).await?;
    let status = if wait.is_some() { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, axum::Json(answer)).into_response())
}
