//! Tests of the outbox where PostgreSQL differs from other databases, and of the built-in bus, on a real server, each
//! in a database of its own. The crate `posthaste` tests the behaviour of the outbox that all databases share.

mod log;
mod migrations;
mod outbox;
mod pool;
mod schemas;
#[path = "../shared/server_support.rs"]
mod server_support;
mod support;
