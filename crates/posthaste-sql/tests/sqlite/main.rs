//! SQLite: the outbox where it differs from others, and what the hub keeps, each test on a file of its own. What all
//! databases have in common is tested in `posthaste`.

mod database;
mod foreign;
mod ingest;
mod letters;
mod letters_laws;
mod migrations;
mod outbox;
mod registry;
mod support;
mod transactions;
