use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use posthaste_api::{DefinitionIn, SubscriptionIn};
use posthaste_hub::{Listed, PageRequest, SubscriptionFilter, Versioned};
use serde::{Deserialize, Serialize};

use crate::extract::{Json, Params, expected_version, id};
use crate::problem::{Answer, Code};
use crate::router::App;

/// The largest page of any list.
pub(crate) const MAX_SIZE: u32 = 500;
pub(crate) const DEFAULT_SIZE: u32 = 50;

/// One page of a list.
#[derive(Serialize)]
struct Page<T> {
    items: Vec<T>,
    page: u32,
    size: u32,
    total: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct DefinitionParams {
    page: Option<u32>,
    size: Option<u32>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct SubscriptionParams {
    subscriber_id: Option<String>,
    definition_id: Option<String>,
    page: Option<u32>,
    size: Option<u32>,
}

pub(crate) async fn list_definitions(
    State(app): State<App>,
    Params(params): Params<DefinitionParams>,
) -> Result<Response, Answer> {
    let request = page_request(params.page, params.size)?;
    Ok(page(app.hub.registrations().definitions(request).await?, request))
}

pub(crate) async fn create_definition(
    State(app): State<App>,
    Json(definition): Json<DefinitionIn>,
) -> Result<Response, Answer> {
    let (key, description) = definition.validate().map_err(Answer::invalid)?;
    let created = app.hub.registrations().create_definition(key, description).await?;
    Ok(versioned(StatusCode::CREATED, created))
}

pub(crate) async fn get_definition(State(app): State<App>, Path(path): Path<String>) -> Result<Response, Answer> {
    let found = app.hub.registrations().definition(id(&path, "definition")?).await?;
    Ok(versioned(StatusCode::OK, found))
}

pub(crate) async fn update_definition(
    State(app): State<App>,
    Path(path): Path<String>,
    headers: HeaderMap,
    Json(definition): Json<DefinitionIn>,
) -> Result<Response, Answer> {
    let (key, description) = definition.validate().map_err(Answer::invalid)?;
    let (id, expected) = (id(&path, "definition")?, expected_version(&headers)?);
    let updated = app.hub.registrations().update_definition(id, key, description, expected).await?;
    Ok(versioned(StatusCode::OK, updated))
}

pub(crate) async fn delete_definition(
    State(app): State<App>,
    Path(path): Path<String>,
    headers: HeaderMap,
) -> Result<StatusCode, Answer> {
    let expected = expected_version(&headers)?;
    app.hub.registrations().delete_definition(id(&path, "definition")?, expected).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(crate) async fn list_subscriptions(
    State(app): State<App>,
    Params(params): Params<SubscriptionParams>,
) -> Result<Response, Answer> {
    let request = page_request(params.page, params.size)?;
    let filter = SubscriptionFilter { subscriber_id: params.subscriber_id, definition_id: params.definition_id };
    Ok(page(app.hub.registrations().subscriptions(&filter, request).await?, request))
}

pub(crate) async fn create_subscription(
    State(app): State<App>,
    Json(subscription): Json<SubscriptionIn>,
) -> Result<Response, Answer> {
    let new = subscription.validate().map_err(Answer::invalid)?;
    let created = app.hub.registrations().create_subscription(new).await?;
    Ok(versioned(StatusCode::CREATED, created))
}

pub(crate) async fn get_subscription(State(app): State<App>, Path(path): Path<String>) -> Result<Response, Answer> {
    let found = app.hub.registrations().subscription(id(&path, "subscription")?).await?;
    Ok(versioned(StatusCode::OK, found))
}

pub(crate) async fn update_subscription(
    State(app): State<App>,
    Path(path): Path<String>,
    headers: HeaderMap,
    Json(subscription): Json<SubscriptionIn>,
) -> Result<Response, Answer> {
    let new = subscription.validate_update().map_err(Answer::invalid)?;
    let (id, expected) = (id(&path, "subscription")?, expected_version(&headers)?);
    let updated = app.hub.registrations().update_subscription(id, new, expected).await?;
    Ok(versioned(StatusCode::OK, updated))
}

pub(crate) async fn delete_subscription(
    State(app): State<App>,
    Path(path): Path<String>,
    headers: HeaderMap,
) -> Result<StatusCode, Answer> {
    let expected = expected_version(&headers)?;
    app.hub.registrations().delete_subscription(id(&path, "subscription")?, expected).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Pages count from 0 and have at most 500 entries.
pub(crate) fn page_request(page: Option<u32>, size: Option<u32>) -> Result<PageRequest, Answer> {
    let size = size.unwrap_or(DEFAULT_SIZE);
    match (1..=MAX_SIZE).contains(&size) {
        true => Ok(PageRequest { page: page.unwrap_or(0), size }),
        false => Err(Answer::of(Code::Invalid, format!("size {size} is not from 1 to {MAX_SIZE}"))),
    }
}

fn page<T: Serialize>(listed: Listed<T>, request: PageRequest) -> Response {
    let page = Page { items: listed.items, page: request.page, size: request.size, total: listed.total };
    axum::Json(page).into_response()
}

/// What was asked for, with the ETag that an If-Match compares.
fn versioned<T: Serialize>(status: StatusCode, found: Versioned<T>) -> Response {
    let mut response = (status, axum::Json(found.value)).into_response();
    if let Ok(etag) = HeaderValue::from_str(&format!("\"{}\"", found.version)) {
        response.headers_mut().insert(header::ETAG, etag);
    }
    response
}
