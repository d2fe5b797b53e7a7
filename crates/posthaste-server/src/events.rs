use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use posthaste_api::{BatchItem, BatchOut, EventIn, EventTrace, FieldError, MAX_BATCH, PublishOut};
use posthaste_core::Event;
use posthaste_hub::Accepted;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::extract::{Json, JsonText, Params, parse};
use crate::problem::{Answer, Code};
use crate::router::App;

/// One event: 202 when it is committed now, 200 when it was before.
pub(crate) async fn publish(
    State(app): State<App>,
    headers: HeaderMap,
    Json(mut event): Json<EventIn>,
) -> Result<Response, Answer> {
    if event.event_id.is_none() {
        let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok());
        event.event_id = key.map(str::to_owned);
    }
    let event = event.validate().map_err(Answer::invalid)?;
    let event_id = event.id().to_owned();
    let accepted = app.hub.ingest().publish(vec![event], false).await?.pop();
    let status = match accepted {
        Some(Accepted::Stored) => StatusCode::ACCEPTED,
        Some(Accepted::Known) => StatusCode::OK,
        Some(refused) => return Err(refusal(refused, &event_id)),
        None => return Err(Answer::of(Code::Internal, "the event has no answer")),
    };
    Ok((status, axum::Json(PublishOut { event_id })).into_response())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BatchParams {
    #[serde(default)]
    atomic: bool,
}

/// Up to 1,000 events: 202 with one result each, or with `atomic` all or nothing.
pub(crate) async fn publish_batch(
    State(app): State<App>,
    Params(params): Params<BatchParams>,
    JsonText(text): JsonText,
) -> Result<Response, Answer> {
    let items: Vec<&RawValue> = serde_json::from_slice(&text)
        .map_err(|error| Answer::of(Code::Malformed, format!("the body is not a JSON array of events: {error}")))?;
    if items.len() > MAX_BATCH {
        let detail = format!("the batch has {} events, more than {MAX_BATCH}: send it in parts", items.len());
        return Err(Answer::of(Code::TooLarge, detail));
    }
    let events: Vec<Result<Event, Answer>> = items.iter().map(|item| event(item)).collect();
    let results = match params.atomic {
        true => store_all(&app, events).await?,
        false => store_each(&app, events).await?,
    };
    Ok((StatusCode::ACCEPTED, axum::Json(BatchOut { results })).into_response())
}

fn event(item: &RawValue) -> Result<Event, Answer> {
    parse::<EventIn>(item.get().as_bytes())?.validate().map_err(Answer::invalid)
}

async fn store_each(app: &App, events: Vec<Result<Event, Answer>>) -> Result<Vec<BatchItem>, Answer> {
    let mut good = Vec::with_capacity(events.len());
    let mut results: Vec<Result<String, Answer>> = Vec::with_capacity(events.len());
    for event in events {
        results.push(event.map(|event| {
            let id = event.id().to_owned();
            good.push(event);
            id
        }));
    }
    let mut accepted = app.hub.ingest().publish(good, false).await?.into_iter();
    let item = |result: Result<String, Answer>| match result {
        Ok(event_id) => match accepted.next() {
            Some(Accepted::Stored) => BatchItem::Stored { event_id, status: 202 },
            Some(Accepted::Known) => BatchItem::Stored { event_id, status: 200 },
            Some(other) => refused(refusal(other, &event_id)),
            None => refused(Answer::of(Code::Internal, "the event has no answer")),
        },
        Err(answer) => refused(answer),
    };
    Ok(results.into_iter().map(item).collect())
}

async fn store_all(app: &App, events: Vec<Result<Event, Answer>>) -> Result<Vec<BatchItem>, Answer> {
    let mut good = Vec::with_capacity(events.len());
    let mut errors = Vec::new();
    for (index, event) in events.into_iter().enumerate() {
        match event {
            Ok(event) => good.push(event),
            Err(answer) => errors.push(FieldError::new(format!("[{index}]"), answer.into_problem().to_string())),
        }
    }
    if !errors.is_empty() {
        return Err(Answer::invalid_as(Code::BatchRefused, errors));
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
        false => Err(Answer::invalid_as(Code::BatchRefused, errors)),
    }
}

fn refusal(accepted: Accepted, event_id: &str) -> Answer {
    match accepted {
        Accepted::Refused(error) => Answer::from(error),
        _ => {
            let detail = format!("event id {event_id:?} belongs to an event of another type or payload, which stays");
            Answer::of(Code::EventIdConflict, detail)
        }
    }
}

fn refused(answer: Answer) -> BatchItem {
    let problem = answer.into_problem();
    BatchItem::Refused { status: problem.status, code: problem.code, detail: problem.detail.unwrap_or(problem.title) }
}

/// Where an event is.
pub(crate) async fn trace(State(app): State<App>, Path(id): Path<String>) -> Result<axum::Json<EventTrace>, Answer> {
    app.hub.trace(&id).await?.map(axum::Json).ok_or_else(|| Answer::not_found("event"))
}
