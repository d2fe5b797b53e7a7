use std::sync::Arc;

use bytes::Bytes;
use posthaste_core::hub_store::SchemaText;
use posthaste_core::{DecodeError, FaultKind, StoreError};

use crate::bounded_cache::BoundedCache;
use crate::framing::{self, Frame};
use crate::registry::{RegistryError, SchemaRegistry};
use crate::schema::{Imports, ParsedSchema, SchemaError};
use crate::shared_requests::SharedRequests;

/// Writes messages of one schema with the id that the registry gave it, and reads messages of any schema that the
/// registry knows.
///
/// The schema is registered as `<topic>-value` before the first message of a topic is written, once for each topic and
/// process.
pub struct Framer {
    registry: Arc<dyn SchemaRegistry>,
    schema: Arc<ParsedSchema>,
    /// The id of the schema, by topic.
    ids: Arc<BoundedCache<String, i32>>,
    registering: SharedRequests<String, i32>,
    /// The schemas of messages that were read, by id.
    schemas: BoundedCache<i32, Arc<ParsedSchema>>,
}

impl Framer {
    /// Writes messages of this schema, which refers to no other schema.
    pub fn new(registry: Arc<dyn SchemaRegistry>, schema: SchemaText) -> Result<Self, SchemaError> {
        Ok(Self {
            registry,
            schema: Arc::new(ParsedSchema::parse(schema, &Imports::new())?),
            ids: Arc::default(),
            registering: SharedRequests::default(),
            schemas: BoundedCache::default(),
        })
    }

    /// The registry that it asks.
    pub fn registry(&self) -> &Arc<dyn SchemaRegistry> {
        &self.registry
    }

    /// The subject of the values of a topic.
    pub fn subject(topic: &str) -> String {
        format!("{topic}-value")
    }

    /// Frames a message with this full name. Registers the schema if the topic is new, and fails if that fails.
    pub async fn encode(&self, topic: &str, message_name: &str, message: &[u8]) -> Result<Bytes, RegistryError> {
        if let Some(value) = self.encode_now(topic, message_name, message) {
            return Ok(value);
        }
        let Some(position) = self.schema.position(message_name) else {
            return Err(RegistryError::Refused { reason: format!("the schema has no message {message_name}") });
        };
        let id = self.register(topic).await?;
        Ok(framing::encode(id, position, message))
    }

    /// Like [`encode`](Self::encode), without waiting: `None` if the topic is new.
    pub fn encode_now(&self, topic: &str, message_name: &str, message: &[u8]) -> Option<Bytes> {
        let id = self.ids.with(topic, |id| *id)?;
        Some(framing::encode(id, self.schema.position(message_name)?, message))
    }

    async fn register(&self, topic: &str) -> Result<i32, RegistryError> {
        let (registry, schema, ids) = (self.registry.clone(), self.schema.clone(), self.ids.clone());
        let topic = topic.to_owned();
        let registering = {
            let topic = topic.clone();
            async move {
                let id = registry.register(&Self::subject(&topic), schema.text()).await?;
                let length = topic.len();
                ids.insert(topic, id, length);
                Ok(id)
            }
        };
        self.registering.run(topic, registering).await
    }

    /// The message in a framed value, if its schema says that it has this full name. The result shares the memory of the
    /// value.
    pub async fn decode(&self, value: &Bytes, message_name: &str) -> Result<Bytes, DecodeError> {
        if let Some(decoded) = self.decode_now(value, message_name) {
            return decoded;
        }
        let frame = frame(value)?;
        let id = frame.schema_id;
        let schema = match self.registry.schema(id).await {
            Ok(Some(schema)) => schema,
            Ok(None) => return Err(DecodeError::Poison(format!("the schema registry has no schema {id}"))),
            Err(error @ RegistryError::Unavailable { .. }) => {
                let doing = format!("look up schema {id}");
                return Err(DecodeError::Outage(StoreError::new(doing, FaultKind::Transient, error)));
            }
            Err(error) => return Err(DecodeError::Poison(format!("schema {id} cannot be used: {error}"))),
        };
        self.schemas.insert(id, schema.clone(), schema.text().text.len());
        message_of(&schema, frame, message_name)
    }

    /// Like [`decode`](Self::decode), without waiting: `None` if the schema was not looked up yet.
    pub fn decode_now(&self, value: &Bytes, message_name: &str) -> Option<Result<Bytes, DecodeError>> {
        let frame = match frame(value) {
            Ok(frame) => frame,
            Err(error) => return Some(Err(error)),
        };
        let id = frame.schema_id;
        self.schemas.with(&id, |schema| message_of(schema, frame, message_name))
    }
}

fn frame(value: &Bytes) -> Result<Frame, DecodeError> {
    framing::decode(value).map_err(|error| DecodeError::Poison(error.to_string()))
}

fn message_of(schema: &ParsedSchema, frame: Frame, message_name: &str) -> Result<Bytes, DecodeError> {
    match schema.message_name(&frame.indexes) {
        Some(name) if name == message_name => Ok(frame.message),
        Some(name) => Err(DecodeError::Poison(format!("a {name} and not a {message_name}"))),
        None => Err(DecodeError::Poison(format!("schema {} has no message {:?}", frame.schema_id, frame.indexes))),
    }
}

impl std::fmt::Debug for Framer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Framer").field("schema", &self.schema.file().package()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
