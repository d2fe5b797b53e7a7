//! The outbox on a real PostgreSQL, each test in a database of its own.

mod dispatcher;
mod leases;
mod migrations;
mod outbox;
mod outbox_doors;
mod source_laws;
mod support;
