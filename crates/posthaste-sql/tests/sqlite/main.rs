//! SQLite: the outbox where it differs from others, and what the hub keeps, each test on a file of its own. What all
//! databases have in common is tested in `posthaste`.

mod database;
mod dead_letters;
mod foreign;
mod hub_database;
mod hub_laws;
mod migrations;
mod outbox;
mod support;
mod transactions;
