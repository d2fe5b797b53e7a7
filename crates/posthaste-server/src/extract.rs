use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use posthaste_api::suggest;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use crate::problem::{Answer, Code};

/// A JSON body as the caller wrote it.
pub(crate) struct JsonText(pub(crate) Bytes);

impl<S: Send + Sync> FromRequest<S> for JsonText {
    type Rejection = Answer;

    async fn from_request(request: Request, state: &S) -> Result<Self, Answer> {
        if !is_json(request.headers()) {
            return Err(Answer::of(Code::UnsupportedMediaType, "send JSON, with content-type: application/json"));
        }
        let body =
            Bytes::from_request(request, state).await.map_err(|rejection| match rejection.status().as_u16() {
                413 => {
                    Answer::of(Code::TooLarge, "send less: a single event, a smaller batch, or a reference to the data")
                }
                _ => Answer::of(Code::Malformed, rejection.body_text()),
            })?;
        Ok(Self(body))
    }
}

/// A JSON body that is a `T`.
pub(crate) struct Json<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = Answer;

    async fn from_request(request: Request, state: &S) -> Result<Self, Answer> {
        let JsonText(text) = JsonText::from_request(request, state).await?;
        parse(&text).map(Self)
    }
}

pub(crate) fn parse<T: DeserializeOwned>(text: &[u8]) -> Result<T, Answer> {
    serde_json::from_slice(text).map_err(|error| {
        let code = if error.is_data() { Code::Invalid } else { Code::Malformed };
        Answer::of(code, suggest::explain(&error.to_string()))
    })
}

fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()) else {
        return false;
    };
    let media_type = value.split(';').next().unwrap_or_default().trim();
    media_type.eq_ignore_ascii_case("application/json")
        || (media_type.len() > 5 && media_type[media_type.len() - 5..].eq_ignore_ascii_case("+json"))
}

/// A query string in which every name is known.
pub(crate) struct Params<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = Answer;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Answer> {
        match Query::<T>::try_from_uri(&parts.uri) {
            Ok(Query(params)) => Ok(Self(params)),
            Err(error) => {
                let text = error.body_text();
                let text = text.strip_prefix("Failed to deserialize query string: ").unwrap_or(&text);
                Err(Answer::of(Code::Invalid, suggest::explain(text)))
            }
        }
    }
}

/// An id in a path. What is no UUID is nothing's id.
pub(crate) fn id(text: &str, what: &str) -> Result<Uuid, Answer> {
    Uuid::parse_str(text).map_err(|_| Answer::not_found(what))
}

/// The version that an `If-Match` wants; none means any.
pub(crate) fn expected_version(headers: &HeaderMap) -> Result<Option<i64>, Answer> {
    let Some(value) = headers.get(header::IF_MATCH) else {
        return Ok(None);
    };
    let text = value.to_str().unwrap_or_default().trim();
    if text == "*" {
        return Ok(None);
    }
    let version = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).and_then(|text| text.parse().ok());
    version.map(Some).ok_or_else(|| Answer::of(Code::Stale, "If-Match is not an ETag that this server gave"))
}
