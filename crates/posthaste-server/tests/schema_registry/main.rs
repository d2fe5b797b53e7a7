//! The Schema Registry with foreign programs: our client with a registry of others, the client of others with ours.

mod confluent_client;
mod registries;
mod rest;
mod support;
