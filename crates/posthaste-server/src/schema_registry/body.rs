use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, header};
use posthaste_schema::{SchemaReference, SchemaText};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::problem::RegistryProblem;
use crate::extract::BodyTimeout;

/// The content type of requests and answers of a registry.
pub(super) const CONTENT_TYPE: &str = "application/vnd.schemaregistry.v1+json";

/// A JSON body. Unknown fields are ignored, as Confluent's registry does: its clients send fields of newer releases.
pub(super) struct JsonBody<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for JsonBody<T> {
    type Rejection = RegistryProblem;

    async fn from_request(request: Request, state: &S) -> Result<Self, RegistryProblem> {
        if !is_accepted(request.headers()) {
            return Err(RegistryProblem::new(415, 415, format!("send JSON, with content-type: {CONTENT_TYPE}")));
        }
        let limit = request.extensions().get::<BodyTimeout>().map_or(Duration::MAX, |limit| limit.0);
        let Ok(body) = tokio::time::timeout(limit, Bytes::from_request(request, state)).await else {
            return Err(RegistryProblem::new(408, 408, "the body took too long to arrive"));
        };
        let body = body.map_err(|rejection| {
            let status = rejection.status().as_u16();
            RegistryProblem::new(status, u32::from(status), rejection.body_text())
        })?;
        let value = serde_json::from_slice(&body);
        value.map(Self).map_err(|error| RegistryProblem::new(400, 400, format!("the body cannot be read: {error}")))
    }
}

/// Confluent's clients send their own content type, plain JSON, bytes or none at all.
fn is_accepted(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return true };
    let media_type = value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let accepted =
        [CONTENT_TYPE, "application/vnd.schemaregistry+json", "application/json", "application/octet-stream"];
    accepted.iter().any(|accepted| accepted.eq_ignore_ascii_case(media_type))
}

/// A schema in a request.
pub(super) struct SchemaBody(pub(super) SchemaText);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SchemaIn {
    schema: String,
    /// Absent for Avro.
    schema_type: Option<String>,
    references: Option<Vec<SchemaReference>>,
}

impl<S: Send + Sync> FromRequest<S> for SchemaBody {
    type Rejection = RegistryProblem;

    async fn from_request(request: Request, state: &S) -> Result<Self, RegistryProblem> {
        let JsonBody(SchemaIn { schema, schema_type, references }) = JsonBody::from_request(request, state).await?;
        let schema_type = schema_type.as_deref().unwrap_or("AVRO");
        if schema_type != "PROTOBUF" {
            let shown: String = schema_type.chars().take(64).collect();
            let message = format!("schema type {shown:?} is not supported: send \"schemaType\": \"PROTOBUF\"");
            return Err(RegistryProblem::new(422, 42201, message));
        }
        Ok(Self(SchemaText { text: schema, references: references.unwrap_or_default() }))
    }
}
