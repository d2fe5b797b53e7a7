//! Posthaste on SQLite: the embedded default.

mod database;
mod migrations;
mod writer;

pub use database::{Database, OpenError, file_of};
