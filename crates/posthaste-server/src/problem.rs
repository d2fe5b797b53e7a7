use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use posthaste_api::{FieldError, InputError, Problem};
use posthaste_core::{FaultKind, StoreError};
use posthaste_hub::{ChannelError, Hub, IngestError, RegistrationError, RegistryError};

/// The error codes of the API, for programs to compare. `docs/errors.md` explains each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    Malformed,
    Invalid,
    BatchRefused,
    ForeignHost,
    NotFound,
    MethodNotAllowed,
    RequestTimeout,
    EventIdConflict,
    EventTypeCollision,
    TooManyChannels,
    DefinitionExists,
    DefinitionInUse,
    UnknownDefinition,
    Stale,
    TooLarge,
    UnsupportedMediaType,
    Internal,
    CommitUnknown,
    StoreUnavailable,
    BusUnavailable,
    Stopping,
}

impl Code {
    /// All codes.
    pub const ALL: [Self; 21] = [
        Self::Malformed,
        Self::Invalid,
        Self::BatchRefused,
        Self::ForeignHost,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::RequestTimeout,
        Self::EventIdConflict,
        Self::EventTypeCollision,
        Self::TooManyChannels,
        Self::DefinitionExists,
        Self::DefinitionInUse,
        Self::UnknownDefinition,
        Self::Stale,
        Self::TooLarge,
        Self::UnsupportedMediaType,
        Self::Internal,
        Self::CommitUnknown,
        Self::StoreUnavailable,
        Self::BusUnavailable,
        Self::Stopping,
    ];

    /// The code in responses.
    pub fn as_str(self) -> &'static str {
        self.parts().0
    }

    pub fn status(self) -> u16 {
        self.parts().1
    }

    fn parts(self) -> (&'static str, u16, &'static str) {
        match self {
            Self::Malformed => ("malformed", 400, "the request cannot be read"),
            Self::Invalid => ("invalid", 400, "the request breaks a rule"),
            Self::BatchRefused => ("batch_refused", 400, "nothing of the batch was stored"),
            Self::ForeignHost => ("foreign_host", 403, "the Host header names another machine"),
            Self::NotFound => ("not_found", 404, "not found"),
            Self::MethodNotAllowed => ("method_not_allowed", 405, "method not allowed"),
            Self::RequestTimeout => ("request_timeout", 408, "the request took too long to arrive"),
            Self::EventIdConflict => ("event_id_conflict", 409, "another event has this id"),
            Self::EventTypeCollision => ("event_type_collision", 409, "another event type has this topic"),
            Self::TooManyChannels => ("too_many_channels", 409, "no more event types"),
            Self::DefinitionExists => ("definition_exists", 409, "the definition exists already"),
            Self::DefinitionInUse => ("definition_in_use", 409, "the definition is in use"),
            Self::UnknownDefinition => ("unknown_definition", 409, "the definition does not exist"),
            Self::Stale => ("stale", 412, "it has changed since it was read"),
            Self::TooLarge => ("too_large", 413, "the request is too large"),
            Self::UnsupportedMediaType => ("unsupported_media_type", 415, "unsupported media type"),
            Self::Internal => ("internal", 500, "internal error"),
            Self::CommitUnknown => ("commit_unknown", 503, "it may or may not be stored"),
            Self::StoreUnavailable => ("store_unavailable", 503, "the database does not answer"),
            Self::BusUnavailable => ("bus_unavailable", 503, "the bus does not answer"),
            Self::Stopping => ("stopping", 503, "the server is stopping"),
        }
    }
}

/// A problem as a response.
#[derive(Debug)]
pub(crate) struct ErrorResponse(Box<Problem>);

impl ErrorResponse {
    pub(crate) fn of(code: Code, detail: impl Into<String>) -> Self {
        let (word, status, title) = code.parts();
        Self(Box::new(Problem::new(status, word, title).detail(detail)))
    }

    pub(crate) fn invalid(errors: Vec<FieldError>) -> Self {
        Self::invalid_as(Code::Invalid, errors)
    }

    pub(crate) fn invalid_as(code: Code, errors: Vec<FieldError>) -> Self {
        let detail: Vec<String> = errors.iter().map(FieldError::to_string).collect();
        Self(Box::new(Self::of(code, detail.join("; ")).0.errors(errors)))
    }

    pub(crate) fn not_found(what: &str) -> Self {
        Self::of(Code::NotFound, format!("there is no {what} with this id"))
    }

    /// For one item of a batch.
    pub(crate) fn into_problem(self) -> Problem {
        *self.0
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(&self.0).unwrap_or_default();
        let mut response = (status, body).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(Problem::CONTENT_TYPE));
        if matches!(status, StatusCode::PAYLOAD_TOO_LARGE | StatusCode::REQUEST_TIMEOUT) {
            // The rest of the body is not read, so the connection cannot be used again.
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl From<InputError> for ErrorResponse {
    fn from(error: InputError) -> Self {
        match error {
            InputError::Malformed(why) => Self::of(Code::Malformed, why),
            InputError::NotAnObject(why) => Self::of(Code::Invalid, why),
            InputError::Invalid(errors) => Self::invalid(errors),
        }
    }
}

impl From<&StoreError> for ErrorResponse {
    fn from(error: &StoreError) -> Self {
        tracing::error!(error = error.chain(), "a request failed");
        match error.kind() {
            FaultKind::Transient => {
                Self::of(Code::StoreUnavailable, "the database does not answer: repeat the request in a moment")
            }
            FaultKind::OutcomeUnknown => {
                let detail = "repeat an event with the same event id: it is stored once; check any other change before \
                              you repeat it";
                Self::of(Code::CommitUnknown, detail)
            }
            FaultKind::Permanent => Self::of(Code::Internal, "see the log of the server"),
        }
    }
}

impl ErrorResponse {
    /// The bus did not do what a request asked for.
    pub(crate) fn of_bus(hub: &Hub, error: &StoreError) -> Self {
        match error.kind() {
            FaultKind::Transient if hub.has_external_bus() => {
                tracing::error!(error = error.chain(), "a request to the bus failed");
                let detail = "the bus does not answer: `posthaste check` says why; repeat the request when it is back";
                Self::of(Code::BusUnavailable, detail)
            }
            _ => Self::from(error),
        }
    }
}

impl From<StoreError> for ErrorResponse {
    fn from(error: StoreError) -> Self {
        Self::from(&error)
    }
}

impl From<IngestError> for ErrorResponse {
    fn from(error: IngestError) -> Self {
        match error {
            IngestError::Store(error) => Self::from(error.as_ref()),
            _ => Self::of(Code::Stopping, "repeat the request in a moment"),
        }
    }
}

impl From<ChannelError> for ErrorResponse {
    fn from(error: ChannelError) -> Self {
        let code = match &error {
            ChannelError::Collision { .. } => Code::EventTypeCollision,
            ChannelError::TooMany { .. } => Code::TooManyChannels,
            _ => Code::Invalid,
        };
        Self::of(code, error.to_string())
    }
}

impl From<RegistrationError> for ErrorResponse {
    fn from(error: RegistrationError) -> Self {
        let text = error.to_string();
        match error {
            RegistrationError::Invalid(errors) => Self::invalid(errors),
            RegistrationError::UnknownDefinition(_) => Self::of(Code::UnknownDefinition, text),
            RegistrationError::Registry(error) => match error {
                RegistryError::Duplicate => Self::of(Code::DefinitionExists, text),
                RegistryError::NotFound => Self::of(Code::NotFound, text),
                RegistryError::InUse => Self::of(Code::DefinitionInUse, text),
                RegistryError::Stale { .. } => Self::of(Code::Stale, text),
                RegistryError::UnknownDefinition => Self::of(Code::UnknownDefinition, text),
                RegistryError::Store(error) => Self::from(error),
                _ => Self::of(Code::Internal, text),
            },
            error => {
                tracing::error!(%error, "a request failed");
                Self::of(Code::Internal, text)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_explained_in_the_documentation() {
        let table = include_str!("../../../docs/errors.md");
        for code in Code::ALL {
            let row = format!("| `{}` | {} |", code.as_str(), code.status());
            assert!(table.contains(&row), "docs/errors.md has no row that starts with {row}");
        }
    }
}
