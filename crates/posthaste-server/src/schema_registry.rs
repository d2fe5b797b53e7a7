//! The built-in Schema Registry, with the paths, bodies and error codes of Confluent's, so that its clients can use it.

mod body;
mod problem;

use std::collections::HashMap;
use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, FromRequestParts, Path, Query, State};
use axum::http::header;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use posthaste_schema::compatibility::Level;
use posthaste_schema::{
    BuiltinError, BuiltinRegistry, ParsedSchema, RegisteredVersion, SchemaReference, VersionNumber,
};
use serde::{Deserialize, Serialize};

use self::body::{CONTENT_TYPE, JsonBody, SchemaBody};
use self::problem::RegistryProblem;

/// Enough for the largest schema in base64, and its references.
const MAX_BODY: usize = 4 * 1024 * 1024;

type Registry = State<Arc<BuiltinRegistry>>;

/// The routes, without the path that they are under.
pub(crate) fn router(registry: Arc<BuiltinRegistry>) -> Router {
    Router::new()
        .route("/subjects", get(subjects))
        .route("/subjects/{subject}", get(newest).post(look_up).delete(delete_subject))
        .route("/subjects/{subject}/versions", get(versions).post(register))
        .route("/subjects/{subject}/versions/{version}", get(version).delete(delete_version))
        .route("/subjects/{subject}/versions/{version}/schema", get(text_of_version))
        .route("/subjects/{subject}/versions/{version}/referencedby", get(referenced_by))
        .route("/schemas/types", get(async || Json(["PROTOBUF"])))
        .route("/schemas/ids/{id}", get(schema))
        .route("/schemas/ids/{id}/subjects", get(subjects_of_schema))
        .route("/schemas/ids/{id}/versions", get(versions_of_schema))
        .route("/config", get(global_level).put(set_global_level))
        .route("/config/{subject}", get(level).put(set_level).delete(remove_level))
        .route("/compatibility/subjects/{subject}/versions/{version}", post(test_compatibility))
        .fallback(async || RegistryProblem::new(404, 404, "there is nothing at this path"))
        .method_not_allowed_fallback(async || RegistryProblem::new(405, 405, "this path does not support this method"))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(registry)
}

/// A JSON answer with the content type of a registry.
struct Json<T>(T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, CONTENT_TYPE)], axum::Json(self.0).into_response().into_body()).into_response()
    }
}

type Answer<T> = Result<Json<T>, RegistryProblem>;

/// The query string. Unknown names are ignored, as Confluent's registry does: its clients send names of newer releases.
struct Params(HashMap<String, String>);

impl<S: Send + Sync> FromRequestParts<S> for Params {
    type Rejection = RegistryProblem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, RegistryProblem> {
        let params = Query::try_from_uri(&parts.uri);
        params.map(|Query(params)| Self(params)).map_err(|error| RegistryProblem::new(400, 400, error.body_text()))
    }
}

impl Params {
    fn is_set(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| value.eq_ignore_ascii_case("true"))
    }

    /// The text of a schema in the requested format.
    fn text_of(&self, schema: &ParsedSchema) -> String {
        match self.0.get("format").map(String::as_str) {
            Some("serialized") => schema.serialized(),
            _ => schema.text().text.clone(),
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SchemaOut {
    #[serde(flatten)]
    version: Option<VersionOut>,
    schema_type: &'static str,
    schema: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    references: Vec<SchemaReference>,
}

#[derive(Serialize)]
struct VersionOut {
    subject: String,
    version: i32,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<i32>,
}

#[derive(Serialize)]
struct IdOut {
    id: i32,
}

#[derive(Serialize, Deserialize)]
struct LevelInOut {
    compatibility: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct LevelOut {
    compatibility_level: &'static str,
}

#[derive(Serialize)]
struct VerdictOut {
    is_compatible: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<Vec<String>>,
}

fn schema_out(params: &Params, schema: &ParsedSchema, version: Option<VersionOut>) -> Json<SchemaOut> {
    let references = schema.text().references.clone();
    Json(SchemaOut { version, schema_type: "PROTOBUF", schema: params.text_of(schema), references })
}

fn version_out(params: &Params, found: RegisteredVersion) -> Json<SchemaOut> {
    let RegisteredVersion { subject, version, id, schema } = found;
    schema_out(params, &schema, Some(VersionOut { subject, version, id: Some(id) }))
}

fn level_out(level: Level) -> Json<LevelOut> {
    Json(LevelOut { compatibility_level: level.as_str() })
}

/// An id that is no number is the id of no schema.
fn id_of(text: &str) -> Result<i32, BuiltinError> {
    text.parse().map_err(|_| BuiltinError::SchemaNotFound)
}

async fn subjects(State(registry): Registry, params: Params) -> Answer<Vec<String>> {
    let mut subjects = registry.subjects(params.is_set("deleted")).await?;
    let prefix = params.0.get("subjectPrefix").map_or("", String::as_str);
    subjects.retain(|subject| subject.starts_with(prefix));
    Ok(Json(subjects))
}

async fn newest(State(registry): Registry, Path(subject): Path<String>, params: Params) -> Answer<SchemaOut> {
    let found = registry.version(&subject, VersionNumber::Latest, false).await?;
    Ok(version_out(&params, found))
}

async fn look_up(
    State(registry): Registry,
    Path(subject): Path<String>,
    params: Params,
    SchemaBody(schema): SchemaBody,
) -> Answer<SchemaOut> {
    let found = registry.look_up(&subject, &schema, params.is_set("deleted")).await?;
    Ok(version_out(&params, found))
}

async fn delete_subject(State(registry): Registry, Path(subject): Path<String>, params: Params) -> Answer<Vec<i32>> {
    Ok(Json(registry.delete_subject(&subject, params.is_set("permanent")).await?))
}

async fn versions(State(registry): Registry, Path(subject): Path<String>, params: Params) -> Answer<Vec<i32>> {
    Ok(Json(registry.versions(&subject, params.is_set("deleted")).await?))
}

/// Equal schemas are found by their normalized form in any case, so the parameter `normalize` changes nothing.
async fn register(
    State(registry): Registry,
    Path(subject): Path<String>,
    SchemaBody(schema): SchemaBody,
) -> Answer<IdOut> {
    Ok(Json(IdOut { id: registry.register_version(&subject, &schema).await? }))
}

async fn version(
    State(registry): Registry,
    Path((subject, version)): Path<(String, String)>,
    params: Params,
) -> Answer<SchemaOut> {
    let found = registry.version(&subject, version.parse()?, params.is_set("deleted")).await?;
    Ok(version_out(&params, found))
}

async fn text_of_version(
    State(registry): Registry,
    Path((subject, version)): Path<(String, String)>,
    params: Params,
) -> Result<String, RegistryProblem> {
    let found = registry.version(&subject, version.parse()?, params.is_set("deleted")).await?;
    Ok(params.text_of(&found.schema))
}

async fn referenced_by(
    State(registry): Registry,
    Path((subject, version)): Path<(String, String)>,
) -> Answer<Vec<i32>> {
    Ok(Json(registry.referring_schemas(&subject, version.parse()?).await?))
}

async fn delete_version(
    State(registry): Registry,
    Path((subject, version)): Path<(String, String)>,
    params: Params,
) -> Answer<i32> {
    Ok(Json(registry.delete_version(&subject, version.parse()?, params.is_set("permanent")).await?))
}

async fn schema(State(registry): Registry, Path(id): Path<String>, params: Params) -> Answer<SchemaOut> {
    let schema = registry.schema_of_id(id_of(&id)?).await?;
    Ok(schema_out(&params, &schema, None))
}

async fn subjects_of_schema(State(registry): Registry, Path(id): Path<String>, params: Params) -> Answer<Vec<String>> {
    let versions = registry.versions_of_id(id_of(&id)?, params.is_set("deleted")).await?;
    let mut subjects: Vec<String> = versions.into_iter().map(|version| version.subject).collect();
    subjects.dedup();
    Ok(Json(subjects))
}

async fn versions_of_schema(
    State(registry): Registry,
    Path(id): Path<String>,
    params: Params,
) -> Answer<Vec<VersionOut>> {
    let versions = registry.versions_of_id(id_of(&id)?, params.is_set("deleted")).await?.into_iter();
    let out = versions.map(|found| VersionOut { subject: found.subject, version: found.version, id: None });
    Ok(Json(out.collect()))
}

async fn global_level(State(registry): Registry) -> Answer<LevelOut> {
    Ok(level_out(registry.global_level().await?))
}

async fn set_global_level(State(registry): Registry, JsonBody(wanted): JsonBody<LevelInOut>) -> Answer<LevelInOut> {
    change_level(&registry, None, wanted).await
}

async fn level(State(registry): Registry, Path(subject): Path<String>, params: Params) -> Answer<LevelOut> {
    match registry.subject_level(&subject).await? {
        Some(level) => Ok(level_out(level)),
        None if params.is_set("defaultToGlobal") => global_level(State(registry)).await,
        None => Err(BuiltinError::NoLevel(subject).into()),
    }
}

async fn set_level(
    State(registry): Registry,
    Path(subject): Path<String>,
    JsonBody(wanted): JsonBody<LevelInOut>,
) -> Answer<LevelInOut> {
    change_level(&registry, Some(&subject), wanted).await
}

async fn change_level(registry: &BuiltinRegistry, subject: Option<&str>, wanted: LevelInOut) -> Answer<LevelInOut> {
    let level: Level = wanted.compatibility.parse().map_err(BuiltinError::from)?;
    registry.set_level(subject, Some(level)).await?;
    Ok(Json(LevelInOut { compatibility: level.as_str().to_owned() }))
}

async fn remove_level(State(registry): Registry, Path(subject): Path<String>) -> Answer<LevelOut> {
    let Some(level) = registry.subject_level(&subject).await? else {
        return Err(BuiltinError::NoLevel(subject).into());
    };
    registry.set_level(Some(&subject), None).await?;
    Ok(level_out(level))
}

async fn test_compatibility(
    State(registry): Registry,
    Path((subject, version)): Path<(String, String)>,
    params: Params,
    SchemaBody(schema): SchemaBody,
) -> Answer<VerdictOut> {
    let findings = registry.test_compatibility(&subject, version.parse()?, &schema).await?;
    let messages = params.is_set("verbose").then(|| findings.iter().map(ToString::to_string).collect());
    Ok(Json(VerdictOut { is_compatible: findings.is_empty(), messages }))
}
