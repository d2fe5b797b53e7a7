//! The stores of posthaste-sql on SQLite, each test on a file of its own.

mod database;
mod letters;
mod migrations;
mod outbox;
mod outbox_doors;
mod registry;
mod source_laws;
mod support;
