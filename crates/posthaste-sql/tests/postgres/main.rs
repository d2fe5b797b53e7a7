//! Tests of the outbox where PostgreSQL differs from other databases, of the built-in bus and of the stores of a hub, on
//! a real server, each in a database of its own. The crate `posthaste` tests the behaviour of the outbox that all
//! databases share.

mod dead_letters;
mod hub_database;
mod hub_laws;
mod hub_migrations;
mod log;
mod migrations;
mod newer_schema;
mod outbox;
mod pool;
mod rolling_upgrade;
#[path = "../shared/server_support.rs"]
mod server_support;
mod support;
