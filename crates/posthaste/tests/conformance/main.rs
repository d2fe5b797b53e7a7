//! What the library does, behaviour by behaviour, on every store that the behaviour touches. `docs/conformance.md` lists
//! those that have an id, with their tests; the others are what stores, and the processes that share one, owe each other.

mod acceptance;
mod agreement;
mod claims;
mod dead_events;
mod defects;
mod dispatcher;
mod hot_path;
mod envelope;
mod harness;
mod headers;
mod inbox;
mod interrupted;
mod memory_kit;
mod laws;
mod leases;
mod metrics;
mod modes;
mod names;
mod order;
mod builder_parts;
mod poller;
mod purge;
mod robustness;
mod starved;
mod store;
mod table;
mod texts;
mod transactions;
mod operator;
mod writer;
