//! The stores of posthaste-sql on SQLite, each test on a file of its own.

mod database;
mod inbox;
mod leases;
mod letters;
mod migrations;
mod ordered;
mod outbox;
mod outbox_doors;
mod registry;
mod source_laws;
mod support;
mod transactions;
mod upkeep;
