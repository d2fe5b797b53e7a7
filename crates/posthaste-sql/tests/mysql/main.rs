//! The outbox on a real MariaDB, each test in a database of its own.

mod inbox;
mod leases;
mod migrations;
mod ordered;
mod outbox;
mod outbox_doors;
mod source_laws;
mod support;
mod upkeep;
