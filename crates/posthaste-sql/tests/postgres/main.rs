//! Tests of the outbox where PostgreSQL differs from other databases, on a real server, each in a database of its own.
//! The crate `posthaste` tests the behaviour that all databases share.

mod migrations;
mod outbox;
mod pool;
#[path = "../shared/server_support.rs"]
mod server_support;
mod support;
