//! SQLite: the behaviour of the outbox that differs from other databases, and the stores of the hub. Each test has its
//! own file. The behaviour that all databases share is tested in `posthaste`.

mod database;
mod dead_letters;
mod foreign;
mod hub_database;
mod hub_laws;
mod hub_migrations;
mod migrations;
mod newer_schema;
mod outbox;
mod support;
mod transactions;
mod wal;
