//! The whole product as a user runs it: the real binary, real sockets, real signals.

mod api;
mod bad_input;
mod commit_unknown;
mod crash;
mod delivery;
mod foreign_clients;
mod isolation;
mod kafka;
mod operators;
mod process;
mod quarantine;
mod readiness;
mod secrets;
mod slow_clients;
mod subscriber;
