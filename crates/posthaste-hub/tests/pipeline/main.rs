//! The hub inside one process: real database, real bus, real HTTP.

mod bad_rows;
mod channels;
mod delivery;
mod egress;
mod logs;
mod quarantine;
mod readiness;
mod registry;
mod retention;
mod reused_ids;
mod support;
