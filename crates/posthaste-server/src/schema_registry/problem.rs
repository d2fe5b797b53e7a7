use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use posthaste_core::FaultKind;
use posthaste_schema::BuiltinError;
use serde::Serialize;

use super::body::CONTENT_TYPE;

/// An error as Confluent's registry reports it.
#[derive(Debug)]
pub(super) struct RegistryProblem {
    status: u16,
    code: u32,
    message: String,
}

#[derive(Serialize)]
struct ProblemOut {
    error_code: u32,
    message: String,
}

impl RegistryProblem {
    pub(super) fn new(status: u16, code: u32, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into() }
    }
}

impl IntoResponse for RegistryProblem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = axum::Json(ProblemOut { error_code: self.code, message: self.message }).into_response().into_body();
        let mut response = (status, [(header::CONTENT_TYPE, CONTENT_TYPE)], body).into_response();
        if matches!(status, StatusCode::PAYLOAD_TOO_LARGE | StatusCode::REQUEST_TIMEOUT) {
            // The rest of the body is not read, so the connection cannot be used again.
            response.headers_mut().insert(header::CONNECTION, header::HeaderValue::from_static("close"));
        }
        response
    }
}

impl From<BuiltinError> for RegistryProblem {
    fn from(error: BuiltinError) -> Self {
        let (status, code) = match &error {
            BuiltinError::SubjectNotFound(_) => (404, 40401),
            BuiltinError::VersionNotFound(_) => (404, 40402),
            BuiltinError::SchemaNotFound => (404, 40403),
            BuiltinError::SubjectDeleted(_) => (404, 40404),
            BuiltinError::SubjectNotDeleted(_) => (404, 40405),
            BuiltinError::VersionDeleted(_) => (404, 40406),
            BuiltinError::VersionNotDeleted(_) => (404, 40407),
            BuiltinError::NoLevel(_) => (404, 40408),
            BuiltinError::InvalidSchema(_) | BuiltinError::UnknownReference(_) => (422, 42201),
            BuiltinError::InvalidVersion(_) => (422, 42202),
            BuiltinError::InvalidLevel(_) => (422, 42203),
            BuiltinError::Full(_) => (422, 42205),
            BuiltinError::Referenced { .. } => (422, 42206),
            BuiltinError::InvalidSubject => (422, 42208),
            BuiltinError::Incompatible { .. } => (409, 409),
            BuiltinError::Busy => (503, 50001),
            BuiltinError::Store(error) => {
                tracing::error!(error = error.chain(), "a request to the schema registry failed");
                return match error.kind() {
                    FaultKind::Permanent => Self::new(500, 50001, "see the log of the server"),
                    _ => Self::new(503, 50001, "the database does not answer: repeat the request in a moment"),
                };
            }
            _ => (500, 50001),
        };
        Self::new(status, code, error.to_string())
    }
}
