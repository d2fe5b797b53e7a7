//! Protobuf messages with the id of their schema, and the Schema Registry that knows the schemas.
//!
//! A value on the bus is framed as Confluent's serializers do it ([`framing`]), so that other programs can read it.

#![warn(missing_docs)]

pub mod compatibility;
pub mod framing;
mod schema;

pub use posthaste_core::hub_store::{SchemaReference, SchemaText};
pub use schema::{Imports, MAX_IMPORT_DEPTH, MAX_REFERENCES, MAX_TEXT, ParsedSchema, SchemaError};
