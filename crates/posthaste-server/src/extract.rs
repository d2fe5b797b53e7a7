use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Uri, header};
use http_body_util::BodyExt;
use posthaste_api::input::{detail, gather};
use posthaste_api::{FieldError, Input, read_json};
use uuid::Uuid;

use crate::problem::{Code, ErrorResponse};

/// How long a body may take to arrive. The router adds it to every request.
#[derive(Clone, Copy)]
pub(crate) struct BodyTimeout(pub(crate) Duration);

/// How large a body may be. The router adds it to every request.
#[derive(Clone, Copy)]
pub(crate) struct MaxBody(pub(crate) usize);

/// How much of a body that is too large is read and dropped. A connection that is closed while the client still sends may
/// lose the answer.
const DRAINED: usize = 16 * 1024 * 1024;

/// A JSON body as the caller wrote it.
pub(crate) struct JsonText(pub(crate) Bytes);

impl<S: Send + Sync> FromRequest<S> for JsonText {
    type Rejection = ErrorResponse;

    async fn from_request(request: Request, _: &S) -> Result<Self, ErrorResponse> {
        if !is_json(request.headers()) {
            return Err(ErrorResponse::of(
                Code::UnsupportedMediaType,
                "send JSON, with content-type: application/json",
            ));
        }
        let limit = request.extensions().get::<BodyTimeout>().map_or(Duration::MAX, |limit| limit.0);
        let max = request.extensions().get::<MaxBody>().map_or(0, |max| max.0);
        match tokio::time::timeout(limit, read(request.into_body(), max)).await {
            Ok(body) => body.map(Self),
            Err(_) => Err(ErrorResponse::of(Code::RequestTimeout, "send the body faster, or in smaller requests")),
        }
    }
}

/// Reads a body of at most this size.
async fn read(mut body: axum::body::Body, max: usize) -> Result<Bytes, ErrorResponse> {
    let (mut kept, mut size) = (Vec::new(), 0);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| ErrorResponse::of(Code::Malformed, error.to_string()))?;
        let Ok(data) = frame.into_data() else { continue };
        size += data.len();
        if size <= max {
            kept.extend_from_slice(&data);
        } else if size > max + DRAINED {
            break;
        }
    }
    match size > max {
        true => {
            let advice = "send less: a single event, a smaller batch, or a reference to the data";
            Err(ErrorResponse::of(Code::TooLarge, advice))
        }
        false => Ok(kept.into()),
    }
}

/// A JSON body that obeys every rule of `T`.
pub(crate) struct Body<T: Input>(pub(crate) T::Checked);

impl<S: Send + Sync, T: Input> FromRequest<S> for Body<T> {
    type Rejection = ErrorResponse;

    async fn from_request(request: Request, state: &S) -> Result<Self, ErrorResponse> {
        let JsonText(text) = JsonText::from_request(request, state).await?;
        Ok(Self(read_json::<T>(&text)?))
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()) else {
        return false;
    };
    let media_type = value.split(';').next().unwrap_or_default().trim();
    media_type.eq_ignore_ascii_case("application/json")
        || (media_type.len() > 5 && media_type[media_type.len() - 5..].eq_ignore_ascii_case("+json"))
}

/// A query string that obeys every rule of `T`.
pub(crate) struct Params<T: Input>(pub(crate) T::Checked);

impl<S: Send + Sync, T: Input> FromRequestParts<S> for Params<T> {
    type Rejection = ErrorResponse;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ErrorResponse> {
        read_query::<T>(parts.uri.query().unwrap_or_default()).map(Self).map_err(ErrorResponse::invalid)
    }
}

fn read_query<T: Input>(text: &str) -> Result<T::Checked, Vec<FieldError>> {
    match query::<T>(text) {
        Ok(params) => params.validate(),
        Err(message) => {
            let pairs = text.split('&').filter(|pair| !pair.is_empty());
            let parts: Vec<(String, &str)> = pairs.map(|pair| (name_of(pair), pair)).collect();
            let read = |parts: &[&(String, &str)]| {
                query::<T>(&parts.iter().map(|(_, pair)| *pair).collect::<Vec<_>>().join("&"))
            };
            let explain = |part: &(String, &str), message: String| {
                // If the value is wrong, the message begins with the name.
                let message = message.strip_prefix(&format!("{}: ", part.0)).unwrap_or(&message).to_owned();
                vec![FieldError::new(part.0.chars().take(64).collect::<String>(), detail(&message))]
            };
            Err(gather(&parts, message, read, explain, |_| Vec::new()))
        }
    }
}

fn query<T: Input>(text: &str) -> Result<T, String> {
    let uri = Uri::builder().path_and_query(format!("/?{text}")).build().map_err(|error| error.to_string())?;
    Query::<T>::try_from_uri(&uri).map(|Query(params)| params).map_err(|error| {
        let text = error.body_text();
        text.strip_prefix("Failed to deserialize query string: ").unwrap_or(&text).to_owned()
    })
}

/// The decoded name of a pair.
fn name_of(pair: &str) -> String {
    let uri = Uri::builder().path_and_query(format!("/?{}=", pair.split('=').next().unwrap_or_default())).build();
    let pairs = uri.ok().and_then(|uri| Query::<Vec<(String, String)>>::try_from_uri(&uri).ok());
    pairs.and_then(|Query(mut pairs)| pairs.pop()).map(|(name, _)| name).unwrap_or_else(|| pair.to_owned())
}

/// The `{id}` of a path.
pub(crate) struct Segment(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for Segment {
    type Rejection = ErrorResponse;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ErrorResponse> {
        let segment = Path::<String>::from_request_parts(parts, state).await;
        segment.map(|Path(text)| Self(text)).map_err(|error| ErrorResponse::of(Code::Malformed, error.body_text()))
    }
}

/// Reads an id in a path. Returns `NotFound` for a text that is not a UUID.
pub(crate) fn id(text: &str, what: &str) -> Result<Uuid, ErrorResponse> {
    Uuid::parse_str(text).map_err(|_| {
        let shown: String = text.chars().take(64).collect();
        ErrorResponse::of(
            Code::NotFound,
            format!("there is no {what} with the id {shown:?}: ids are UUIDs, as lists show them"),
        )
    })
}

/// The version that `If-Match` requires; `None` means any.
pub(crate) fn expected_version(headers: &HeaderMap) -> Result<Option<i64>, ErrorResponse> {
    let Some(value) = headers.get(header::IF_MATCH) else {
        return Ok(None);
    };
    let text = value.to_str().unwrap_or_default().trim();
    if text == "*" {
        return Ok(None);
    }
    let version = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).and_then(|text| text.parse().ok());
    version.map(Some).ok_or_else(|| ErrorResponse::of(Code::Stale, "If-Match is not an ETag that this server gave"))
}
