//! The behaviour of the library, one test per behaviour, on every store. `docs/conformance.md` lists the behaviours
//! that have an id, with their tests. The other tests check the contract of stores and of processes that share a table.

mod acceptance;
mod claims;
mod dead_events;
mod defects;
mod dispatcher;
mod edge_cases;
mod envelope;
mod harness;
mod headers;
mod inbox;
mod inserts;
mod interrupted_writes;
mod laws;
mod leases;
mod leases_backoff_routing;
mod metrics;
mod modes;
mod operator;
mod order;
mod poller;
mod purge;
mod resource_starvation;
mod settings_and_test_kit;
mod shared_settings;
mod store;
mod table;
mod table_names;
mod texts;
mod transactions;
mod writer;
