use std::collections::VecDeque;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use posthaste_core::hub_store::{SchemaReference, SchemaText};

use crate::compatibility::Level;
use crate::schema::{Imports, MAX_IMPORT_DEPTH, MAX_REFERENCES, ParsedSchema, SchemaError};

/// A Schema Registry: it gives every schema an id, for ever.
#[async_trait]
pub trait SchemaRegistry: Send + Sync + 'static {
    /// Registers a schema as the newest version of a subject and returns its id. The same schema again gets the same id.
    async fn register(&self, subject: &str, schema: &SchemaText) -> Result<i32, RegistryError>;

    /// The schema with this id; `None` if the registry says that there is none.
    async fn schema(&self, id: i32) -> Result<Option<Arc<ParsedSchema>>, RegistryError>;

    /// Sets which changes of a subject are allowed.
    async fn set_compatibility(&self, subject: &str, level: Level) -> Result<(), RegistryError>;

    /// Fails if the registry cannot be used now.
    async fn check(&self) -> Result<(), RegistryError>;
}

/// Why a registry did not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// The schema is not compatible with earlier versions of its subject. It will be refused again.
    #[error("the schema is not compatible with earlier versions: {reason}")]
    Incompatible {
        /// What the registry says about it.
        reason: String,
    },
    /// The request is refused for another reason. It will be refused again.
    #[error("the schema registry refuses: {reason}")]
    Refused {
        /// What is wrong.
        reason: String,
    },
    /// The registry cannot be reached or does not work. The same request may succeed later.
    #[error("the schema registry is unavailable: {reason}")]
    Unavailable {
        /// What happened.
        reason: String,
    },
}

impl RegistryError {
    pub(crate) fn unavailable(reason: impl Into<String>) -> Self {
        Self::Unavailable { reason: reason.into() }
    }
}

impl From<SchemaError> for RegistryError {
    fn from(error: SchemaError) -> Self {
        Self::Refused { reason: error.to_string() }
    }
}

/// Collects the texts of all schemas that these references lead to. `fetch` gets one of them.
pub(crate) async fn collect_imports<'a, E: From<SchemaError>>(
    references: &[SchemaReference],
    fetch: impl Fn(SchemaReference) -> BoxFuture<'a, Result<SchemaText, E>>,
) -> Result<Imports, E> {
    let mut imports = Imports::new();
    let mut waiting: VecDeque<(usize, SchemaReference)> = references.iter().map(|next| (1, next.clone())).collect();
    while let Some((depth, reference)) = waiting.pop_front() {
        if imports.contains_key(&reference.name) {
            continue;
        }
        if imports.len() + waiting.len() >= MAX_REFERENCES {
            return Err(SchemaError::TooManyReferences { count: imports.len() + waiting.len() + 1 }.into());
        }
        if depth > MAX_IMPORT_DEPTH {
            return Err(SchemaError::DeepReferences.into());
        }
        let schema = fetch(reference.clone()).await?;
        waiting.extend(schema.references.into_iter().take(MAX_REFERENCES).map(|next| (depth + 1, next)));
        imports.insert(reference.name, schema.text);
    }
    Ok(imports)
}
