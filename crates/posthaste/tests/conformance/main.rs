//! What the library does, behaviour by behaviour, on every store that the behaviour touches. `docs/conformance.md` lists
//! them with their tests.

mod acceptance;
mod dead_events;
mod defects;
mod dispatcher;
mod envelope;
mod harness;
mod headers;
mod kit;
mod metrics;
mod modes;
mod parts;
mod poller;
mod purge;
mod robustness;
mod store;
mod transactions;
mod writer;
