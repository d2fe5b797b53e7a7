//! What the library does, behaviour by behaviour, on every store that the behaviour touches. `docs/conformance.md` lists
//! those that have an id, with their tests; the others are what stores, and the processes that share one, owe each other.

mod acceptance;
mod agreement;
mod builder_parts;
mod claims;
mod dead_events;
mod defects;
mod dispatcher;
mod envelope;
mod harness;
mod headers;
mod hot_path;
mod inbox;
mod interrupted;
mod laws;
mod leases;
mod memory_kit;
mod metrics;
mod modes;
mod names;
mod operator;
mod order;
mod poller;
mod purge;
mod robustness;
mod starved;
mod store;
mod table;
mod texts;
mod transactions;
mod writer;
