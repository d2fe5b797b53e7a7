mod http;
mod options;
mod unknown_ids;

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use hyper::{Method, StatusCode};
use posthaste_core::hub_store::{SchemaReference, SchemaText};
use ring::digest;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use self::http::{Answer, Call, Http};
pub use self::options::{ClientOptions, Credentials, OptionsError};
use self::unknown_ids::UnknownIds;
use crate::bounded_cache::BoundedCache;
use crate::compatibility::Level;
use crate::registry::{RegistryError, SchemaRegistry, collect_imports};
use crate::schema::ParsedSchema;
use crate::shared_requests::SharedRequests;

/// The error code for an id that no schema has.
const SCHEMA_NOT_FOUND: i64 = 40403;
/// How many bytes of an answer are shown.
const SHOWN: usize = 400;

/// A Schema Registry with Confluent's REST API, reached by HTTP.
///
/// Ids never change, so both directions are cached for ever. Look-ups of one id at the same time share one request.
#[derive(Clone)]
pub struct RegistryClient {
    inner: Arc<Inner>,
}

struct Inner {
    http: Http,
    /// Ids by subject and digest of the schema.
    ids: BoundedCache<(String, Bytes), i32>,
    schemas: BoundedCache<i32, Arc<ParsedSchema>>,
    /// Look-ups that found no schema, and until when that is believed.
    failures: BoundedCache<i32, (Instant, LookUp)>,
    unknown: UnknownIds,
    looking_up: SharedRequests<i32, Option<Arc<ParsedSchema>>>,
}

type LookUp = Result<Option<Arc<ParsedSchema>>, RegistryError>;

/// A schema in a request.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SchemaOut<'a> {
    schema_type: &'a str,
    schema: &'a str,
    references: &'a [SchemaReference],
}

/// A schema in an answer.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SchemaIn {
    schema: String,
    /// Absent for Avro.
    schema_type: Option<String>,
    references: Option<Vec<SchemaReference>>,
}

#[derive(Deserialize)]
struct IdIn {
    id: i32,
}

#[derive(Serialize)]
struct LevelOut {
    compatibility: &'static str,
}

/// The name of the field depends on the method.
#[derive(Deserialize)]
struct LevelIn {
    #[serde(rename = "compatibilityLevel", alias = "compatibility")]
    _level: String,
}

#[derive(Deserialize)]
struct VerdictIn {
    is_compatible: bool,
}

#[derive(Deserialize)]
struct ErrorIn {
    error_code: i64,
    #[serde(default)]
    message: String,
}

impl RegistryClient {
    /// A client. It connects when it is first used.
    pub fn new(options: ClientOptions) -> Self {
        let inner = Inner {
            http: Http::new(options),
            ids: BoundedCache::default(),
            schemas: BoundedCache::default(),
            failures: BoundedCache::default(),
            unknown: UnknownIds::default(),
            looking_up: SharedRequests::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// True if the registry would accept this schema as the next version of the subject. A subject without a version
    /// accepts any schema.
    pub async fn is_compatible(&self, subject: &str, schema: &SchemaText) -> Result<bool, RegistryError> {
        let path = ["compatibility", "subjects", subject, "versions", "latest"];
        let answer = self.inner.call(Method::POST, &path, Some(body(&schema_out(schema)))).await?;
        if answer.status == StatusCode::NOT_FOUND && error_of(&answer).is_some() {
            return Ok(true);
        }
        Ok(read::<VerdictIn>(answer)?.is_compatible)
    }
}

#[async_trait]
impl SchemaRegistry for RegistryClient {
    async fn register(&self, subject: &str, schema: &SchemaText) -> Result<i32, RegistryError> {
        let body = body(&schema_out(schema));
        let digest = Bytes::copy_from_slice(digest::digest(&digest::SHA256, &body).as_ref());
        let key = (subject.to_owned(), digest);
        if let Some(id) = self.inner.ids.with(&key, |id| *id) {
            return Ok(id);
        }
        let answer = self.inner.call(Method::POST, &["subjects", subject, "versions"], Some(body)).await?;
        let from = answer.from.clone();
        let IdIn { id } = read(answer)?;
        if id < 1 {
            return Err(RegistryError::unavailable(format!("{from} answers with the schema id {id}")));
        }
        let length = key.0.len();
        self.inner.ids.insert(key, id, length);
        Ok(id)
    }

    async fn schema(&self, id: i32) -> LookUp {
        if let Some(schema) = self.inner.schemas.with(&id, Arc::clone) {
            return Ok(Some(schema));
        }
        let remembered =
            self.inner.failures.with(&id, |(until, result)| (Instant::now() < *until).then(|| result.clone()));
        if let Some(Some(result)) = remembered {
            return result;
        }
        let inner = self.inner.clone();
        self.inner.looking_up.run(id, async move { inner.look_up(id).await }).await
    }

    async fn set_compatibility(&self, subject: &str, level: Level) -> Result<(), RegistryError> {
        let body = body(&LevelOut { compatibility: level.as_str() });
        let answer = self.inner.call(Method::PUT, &["config", subject], Some(body)).await?;
        read::<LevelIn>(answer).map(|_| ())
    }

    async fn check(&self) -> Result<(), RegistryError> {
        let answer = self.inner.call(Method::GET, &["config"], None).await?;
        read::<LevelIn>(answer).map(|_| ())
    }
}

impl Inner {
    async fn call(&self, method: Method, path: &[&str], body: Option<Bytes>) -> Result<Answer, RegistryError> {
        self.http.send(Call { method, path, body }).await
    }

    /// Asks the registry and remembers the answer.
    async fn look_up(self: Arc<Self>, id: i32) -> LookUp {
        let result = self.clone().request_schema(id).await;
        match &result {
            Ok(Some(schema)) => self.schemas.insert(id, schema.clone(), schema.text().text.len()),
            failure => {
                let until = Instant::now() + self.http.options().failure_memory;
                self.failures.insert(id, (until, failure.clone()), 0);
            }
        }
        result
    }

    async fn request_schema(self: Arc<Self>, id: i32) -> LookUp {
        let answer = self.call(Method::GET, &["schemas", "ids", &id.to_string()], None).await?;
        if answer.status == StatusCode::NOT_FOUND
            && error_of(&answer).is_some_and(|error| error.error_code == SCHEMA_NOT_FOUND)
        {
            return self.unknown(id, &answer.from);
        }
        let text = protobuf(read(answer)?)?;
        let imports = collect_imports(&text.references, |reference| {
            let inner = self.clone();
            Box::pin(async move { inner.request_version(&reference).await })
        });
        let imports = imports.await?;
        Ok(Some(Arc::new(ParsedSchema::parse(text, &imports)?)))
    }

    /// The registry does not know this id. A replica of it may still learn it.
    fn unknown(&self, id: i32, from: &str) -> LookUp {
        self.http.prefer_another();
        match self.unknown.may_be_learnt(id, self.http.options().replica_lag, Instant::now()) {
            true => Err(RegistryError::unavailable(format!("{from} does not know the schema id {id} yet"))),
            false => Ok(None),
        }
    }

    async fn request_version(&self, reference: &SchemaReference) -> Result<SchemaText, RegistryError> {
        let version = reference.version.to_string();
        let answer = self.call(Method::GET, &["subjects", &reference.subject, "versions", &version], None).await?;
        protobuf(read(answer)?)
    }
}

fn schema_out(schema: &SchemaText) -> SchemaOut<'_> {
    SchemaOut { schema_type: "PROTOBUF", schema: &schema.text, references: &schema.references }
}

/// A request is made of texts and numbers, which JSON can always hold.
fn body(value: &impl Serialize) -> Bytes {
    serde_json::to_vec(value).unwrap_or_default().into()
}

fn protobuf(schema: SchemaIn) -> Result<SchemaText, RegistryError> {
    let schema_type = schema.schema_type.as_deref().unwrap_or("AVRO");
    if schema_type != "PROTOBUF" {
        return Err(RegistryError::Refused { reason: format!("it is a schema of the type {schema_type}") });
    }
    Ok(SchemaText { text: schema.schema, references: schema.references.unwrap_or_default() })
}

fn error_of(answer: &Answer) -> Option<ErrorIn> {
    serde_json::from_slice(&answer.body).ok()
}

/// The error code of a registry whose mode permits no changes.
const OPERATION_NOT_PERMITTED: i64 = 42_205;

/// Reads a successful answer, or what it says is wrong.
fn read<T: DeserializeOwned>(answer: Answer) -> Result<T, RegistryError> {
    let Answer { status, body, from } = &answer;
    if status.is_success() {
        return serde_json::from_slice(body).map_err(|error| {
            let (start, kind) = (shown(body), kind_of(&error));
            RegistryError::unavailable(format!("{from} answers {status} with {kind}: {start:?}"))
        });
    }
    let Some(error) = error_of(&answer) else {
        let hint = "it may not be a schema registry, or its path is missing";
        return Err(RegistryError::unavailable(format!("{from} answers {status}, {hint}: {:?}", shown(body))));
    };
    let reason = shown(error.message.as_bytes());
    Err(match *status {
        StatusCode::CONFLICT => RegistryError::Incompatible { reason },
        // A registry that is read-only now says so with the status of a bad schema.
        StatusCode::UNPROCESSABLE_ENTITY if error.error_code == OPERATION_NOT_PERMITTED => {
            RegistryError::unavailable(format!("{from} does not permit changes now: {reason}"))
        }
        StatusCode::UNPROCESSABLE_ENTITY | StatusCode::PAYLOAD_TOO_LARGE => RegistryError::Refused { reason },
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            RegistryError::unavailable(format!("{from} answers {status}, check its credentials: {reason}"))
        }
        _ => RegistryError::unavailable(format!("{from} answers {status} ({}): {reason}", error.error_code)),
    })
}

fn kind_of(error: &serde_json::Error) -> &'static str {
    match error.classify() {
        serde_json::error::Category::Eof => "JSON that is cut off",
        serde_json::error::Category::Data => "other JSON than a schema registry",
        _ => "no JSON",
    }
}

/// The start of a text from outside.
fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(SHOWN)]).into_owned()
}
