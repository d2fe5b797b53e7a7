//! Protobuf messages with the id of their schema, and the Schema Registry that knows the schemas.
//!
//! A value on the bus is framed as Confluent's serializers do it ([`framing`]), so that other programs can read it. A
//! [`Framer`] does that with the ids of a [`SchemaRegistry`], which is a [`RegistryClient`] of a registry elsewhere or
//! the [`BuiltinRegistry`] in the database of the hub.
//!
//! An outage of the registry is never taken for a fault of a record: [`RegistryError`] distinguishes them.

#![warn(missing_docs)]

mod bounded_cache;
mod builtin;
mod client;
pub mod compatibility;
mod framer;
pub mod framing;
mod registry;
mod schema;
mod shared_requests;

pub use builtin::{BuiltinError, BuiltinRegistry, MAX_SUBJECT, RegisteredVersion, VersionNumber};
pub use client::{ClientOptions, Credentials, OptionsError, RegistryClient};
pub use framer::Framer;
pub use posthaste_core::hub_store::{SchemaReference, SchemaText};
pub use registry::{RegistryError, SchemaRegistry};
pub use schema::{Imports, MAX_IMPORT_DEPTH, MAX_REFERENCES, MAX_TEXT, ParsedSchema, SchemaError};
