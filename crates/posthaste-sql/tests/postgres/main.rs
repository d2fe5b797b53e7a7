//! The outbox on a real PostgreSQL, where it differs from others, each test in a database of its own. What all databases have
//! in common is tested in `posthaste`.

mod migrations;
mod outbox;
mod pool;
mod support;
