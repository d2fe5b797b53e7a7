use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use posthaste_api::{
    BatchItem, BatchOut, EventIn, EventTrace, FieldError, Input, MAX_BATCH, PublishOut, is_event_id, read_json,
    read_json_with,
};
use posthaste_core::Event;
use posthaste_hub::Accepted;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::extract::{JsonText, Params, Segment};
use crate::problem::{Code, ErrorResponse};
use crate::router::App;

/// Publishes one event: 202 if it is committed now, 200 if it was committed before.
pub(crate) async fn publish(
    State(app): State<App>,
    headers: HeaderMap,
    JsonText(text): JsonText,
) -> Result<Response, ErrorResponse> {
    let event = read_json_with::<EventIn>(&text, |event| add_idempotency_key(event, &headers))?;
    let event_id = event.id().to_owned();
    let accepted = app.hub.ingest().publish(vec![event], false).await?.pop();
    let status = match accepted {
        Some(Accepted::Stored) => StatusCode::ACCEPTED,
        Some(Accepted::Known) => StatusCode::OK,
        Some(refused) => return Err(refusal(refused, &event_id)),
        None => return Err(ErrorResponse::of(Code::Internal, "the event has no result")),
    };
    Ok((status, axum::Json(PublishOut { event_id })).into_response())
}

/// The key becomes the event's id if the event has none, so that a repeated request stores nothing twice. A key that
/// cannot be used is refused, because without it the repeated request would store a second event.
fn add_idempotency_key(event: &mut EventIn, headers: &HeaderMap) -> Vec<FieldError> {
    const NAME: &str = "Idempotency-Key";
    let mut keys = headers.get_all(NAME).iter();
    let Some(key) = keys.next() else { return Vec::new() };
    let refused = |why: &str| vec![FieldError::new(NAME, why)];
    if keys.next().is_some() {
        return refused("is given more than once");
    }
    match key.to_str().ok().filter(|key| is_event_id(key)) {
        Some(key) => {
            event.event_id.get_or_insert_with(|| key.to_owned());
            Vec::new()
        }
        None => refused("is not 1 to 128 characters of A-Z a-z 0-9 . _ : -"),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BatchParams {
    #[serde(default)]
    atomic: bool,
}

impl Input for BatchParams {
    type Checked = Self;

    fn validate(self) -> Result<Self, Vec<FieldError>> {
        Ok(self)
    }
}

/// Publishes up to 1,000 events: 202 with one result each, or with `atomic` all or nothing.
pub(crate) async fn publish_batch(
    State(app): State<App>,
    Params(params): Params<BatchParams>,
    JsonText(text): JsonText,
) -> Result<Response, ErrorResponse> {
    let items: Vec<&RawValue> = serde_json::from_slice(&text).map_err(|error| {
        ErrorResponse::of(Code::Malformed, format!("the body is not a JSON array of events: {error}"))
    })?;
    if items.len() > MAX_BATCH {
        let detail = format!("the batch has {} events, more than {MAX_BATCH}: send it in parts", items.len());
        return Err(ErrorResponse::of(Code::TooLarge, detail));
    }
    let events: Vec<Result<Event, ErrorResponse>> = items.iter().map(|item| event(item)).collect();
    let results = match params.atomic {
        true => store_all(&app, events).await?,
        false => store_each(&app, events).await?,
    };
    Ok((StatusCode::ACCEPTED, axum::Json(BatchOut { results })).into_response())
}

fn event(item: &RawValue) -> Result<Event, ErrorResponse> {
    Ok(read_json::<EventIn>(item.get().as_bytes())?)
}

async fn store_each(app: &App, events: Vec<Result<Event, ErrorResponse>>) -> Result<Vec<BatchItem>, ErrorResponse> {
    let mut good = Vec::with_capacity(events.len());
    let mut results: Vec<Result<String, ErrorResponse>> = Vec::with_capacity(events.len());
    for event in events {
        results.push(event.map(|event| {
            let id = event.id().to_owned();
            good.push(event);
            id
        }));
    }
    let mut accepted = app.hub.ingest().publish(good, false).await?.into_iter();
    let item = |result: Result<String, ErrorResponse>| match result {
        Ok(event_id) => match accepted.next() {
            Some(Accepted::Stored) => BatchItem::Stored { event_id, status: 202 },
            Some(Accepted::Known) => BatchItem::Stored { event_id, status: 200 },
            Some(other) => refused(refusal(other, &event_id)),
            None => refused(ErrorResponse::of(Code::Internal, "the event has no result")),
        },
        Err(answer) => refused(answer),
    };
    Ok(results.into_iter().map(item).collect())
}

async fn store_all(app: &App, events: Vec<Result<Event, ErrorResponse>>) -> Result<Vec<BatchItem>, ErrorResponse> {
    let mut good = Vec::with_capacity(events.len());
    let mut errors = Vec::new();
    for (index, event) in events.into_iter().enumerate() {
        match event {
            Ok(event) => good.push(event),
            Err(answer) => errors.push(FieldError::new(format!("[{index}]"), answer.into_problem().to_string())),
        }
    }
    if !errors.is_empty() {
        return Err(ErrorResponse::invalid_as(Code::BatchRefused, errors));
    }
    let ids: Vec<String> = good.iter().map(|event| event.id().to_owned()).collect();
    let accepted = app.hub.ingest().publish(good, true).await?;
    let mut results = Vec::with_capacity(ids.len());
    for (index, (event_id, accepted)) in ids.into_iter().zip(accepted).enumerate() {
        match accepted {
            Accepted::Stored => results.push(BatchItem::Stored { event_id, status: 202 }),
            Accepted::Known => results.push(BatchItem::Stored { event_id, status: 200 }),
            Accepted::Withheld => {}
            other => {
                errors.push(FieldError::new(format!("[{index}]"), refusal(other, &event_id).into_problem().to_string()))
            }
        }
    }
    match errors.is_empty() {
        true => Ok(results),
        false => Err(ErrorResponse::invalid_as(Code::BatchRefused, errors)),
    }
}

fn refusal(accepted: Accepted, event_id: &str) -> ErrorResponse {
    match accepted {
        Accepted::Refused(error) => ErrorResponse::from(error),
        _ => {
            let detail = format!("event id {event_id:?} belongs to a stored event with another type or payload");
            ErrorResponse::of(Code::EventIdConflict, detail)
        }
    }
}

fn refused(answer: ErrorResponse) -> BatchItem {
    let problem = answer.into_problem();
    BatchItem::Refused { status: problem.status, code: problem.code, detail: problem.detail.unwrap_or(problem.title) }
}

/// Returns where an event is in the pipeline.
pub(crate) async fn trace(
    State(app): State<App>,
    Segment(id): Segment,
) -> Result<axum::Json<EventTrace>, ErrorResponse> {
    app.hub.trace(&id).await?.map(axum::Json).ok_or_else(|| ErrorResponse::not_found("event"))
}
