//! The whole product as a user runs it: the real binary, real sockets, real signals.

mod api;
mod bad_input;
mod channels;
mod commit_unknown;
mod crash;
mod delivery;
mod egress;
mod filters;
mod foreign_clients;
mod isolation;
mod kafka;
mod migrate;
mod operators;
mod postgres_tls;
mod process;
mod quarantine;
mod readiness;
mod replica_faults;
mod replicas;
mod reused_ids;
mod roles;
mod secrets;
mod slow_clients;
mod sources;
mod subscriber;
