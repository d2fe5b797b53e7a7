use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use posthaste_api::{DefinitionIn, FieldError, Input};
use posthaste_hub::{
    Created, Listed, PageRequest, SubscriptionFilter, SubscriptionReplacement, SubscriptionRequest, Versioned,
};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::extract::{Body, Params, Segment, expected_version, id};
use crate::paging;
use crate::problem::ErrorResponse;
use crate::router::App;

/// One page of a list.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Page<T> {
    items: Vec<T>,
    page: u32,
    size: u32,
    total: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<Uuid>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct DefinitionParams {
    page: Option<u32>,
    size: Option<u32>,
    cursor: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct SubscriptionParams {
    subscriber_id: Option<String>,
    definition_id: Option<String>,
    page: Option<u32>,
    size: Option<u32>,
    cursor: Option<String>,
}

impl Input for DefinitionParams {
    type Checked = PageRequest;

    fn validate(self) -> Result<PageRequest, Vec<FieldError>> {
        let mut errors = Vec::new();
        let request = paging::page_request_by_id(self.page, self.size, self.cursor, &mut errors);
        if errors.is_empty() { Ok(request) } else { Err(errors) }
    }
}

impl Input for SubscriptionParams {
    type Checked = (SubscriptionFilter, PageRequest);

    fn validate(self) -> Result<Self::Checked, Vec<FieldError>> {
        let mut errors = Vec::new();
        let request = paging::page_request_by_id(self.page, self.size, self.cursor, &mut errors);
        let filter = SubscriptionFilter { subscriber_id: self.subscriber_id, definition_id: self.definition_id };
        if errors.is_empty() { Ok((filter, request)) } else { Err(errors) }
    }
}

pub(crate) async fn list_definitions(
    State(app): State<App>,
    Params(request): Params<DefinitionParams>,
) -> Result<Response, ErrorResponse> {
    let listed = app.hub.registrations().definitions(request.clone()).await?;
    Ok(page(listed, &request, |definition| definition.id))
}

pub(crate) async fn create_definition(
    State(app): State<App>,
    Body((key, description)): Body<DefinitionIn>,
) -> Result<Response, ErrorResponse> {
    let created = app.hub.registrations().create_definition(key, description).await?;
    Ok(versioned(StatusCode::CREATED, created))
}

pub(crate) async fn get_definition(State(app): State<App>, Segment(path): Segment) -> Result<Response, ErrorResponse> {
    let found = app.hub.registrations().definition(id(&path, "definition")?).await?;
    Ok(versioned(StatusCode::OK, found))
}

pub(crate) async fn update_definition(
    State(app): State<App>,
    Segment(path): Segment,
    headers: HeaderMap,
    Body((key, description)): Body<DefinitionIn>,
) -> Result<Response, ErrorResponse> {
    let (id, expected) = (id(&path, "definition")?, expected_version(&headers)?);
    let updated = app.hub.registrations().update_definition(id, key, description, expected).await?;
    Ok(versioned(StatusCode::OK, updated))
}

pub(crate) async fn delete_definition(
    State(app): State<App>,
    Segment(path): Segment,
    headers: HeaderMap,
) -> Result<StatusCode, ErrorResponse> {
    let expected = expected_version(&headers)?;
    app.hub.registrations().delete_definition(id(&path, "definition")?, expected).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(crate) async fn list_subscriptions(
    State(app): State<App>,
    Params((filter, request)): Params<SubscriptionParams>,
) -> Result<Response, ErrorResponse> {
    let listed = app.hub.registrations().subscriptions(&filter, request.clone()).await?;
    Ok(page(listed, &request, |subscription| subscription.id))
}

/// 201, or 200 if the subscriber has this subscription already: the existing one stays as it is.
pub(crate) async fn create_subscription(
    State(app): State<App>,
    Body(new): Body<SubscriptionRequest>,
) -> Result<Response, ErrorResponse> {
    Ok(match app.hub.registrations().create_subscription(new).await? {
        Created::New(subscription) => versioned(StatusCode::CREATED, subscription),
        Created::Existing(subscription) => versioned(StatusCode::OK, subscription),
    })
}

pub(crate) async fn get_subscription(
    State(app): State<App>,
    Segment(path): Segment,
) -> Result<Response, ErrorResponse> {
    let found = app.hub.registrations().subscription(id(&path, "subscription")?).await?;
    Ok(versioned(StatusCode::OK, found))
}

pub(crate) async fn update_subscription(
    State(app): State<App>,
    Segment(path): Segment,
    headers: HeaderMap,
    Body(new): Body<SubscriptionReplacement>,
) -> Result<Response, ErrorResponse> {
    let (id, expected) = (id(&path, "subscription")?, expected_version(&headers)?);
    let updated = app.hub.registrations().update_subscription(id, new, expected).await?;
    Ok(versioned(StatusCode::OK, updated))
}

pub(crate) async fn delete_subscription(
    State(app): State<App>,
    Segment(path): Segment,
    headers: HeaderMap,
) -> Result<StatusCode, ErrorResponse> {
    let expected = expected_version(&headers)?;
    app.hub.registrations().delete_subscription(id(&path, "subscription")?, expected).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn page<T: Serialize>(listed: Listed<T>, request: &PageRequest, id: impl Fn(&T) -> Uuid) -> Response {
    let next_cursor = listed.items.last().filter(|_| listed.has_more).map(id);
    let Listed { items, total, .. } = listed;
    axum::Json(Page { items, page: request.page, size: request.size, total, next_cursor }).into_response()
}

/// A response with the ETag that an If-Match compares.
fn versioned<T: Serialize>(status: StatusCode, found: Versioned<T>) -> Response {
    let mut response = (status, axum::Json(found.value)).into_response();
    if let Ok(etag) = HeaderValue::from_str(&format!("\"{}\"", found.version)) {
        response.headers_mut().insert(header::ETAG, etag);
    }
    response
}
