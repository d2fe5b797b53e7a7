//! What only our own tests need. A service that tests its events uses `posthaste-testing` instead.
//!
//! - The laws of each seam as a suite: [`mod@source_laws`], [`mod@bus_laws`], [`mod@hub_laws`]. A backend is
//!   right when it passes the suite of its seam.
//! - [`mod@bus_faults`]: faults of a bus with real [`processes`] and real servers.
//! - The [`simulation`]: many processes on one in-memory database with injected faults, and a checker of what they did.
//! - [`servers`]: a real PostgreSQL, MariaDB and Kafka, to be used and to be crashed.
//! - [`report`]: what a benchmark prints.
//! - [`MemoryBus`] and [`MemorySink`]: a bus and a sink without I/O.

#![warn(missing_docs)]

pub mod bus_faults;
pub mod bus_laws;
pub mod hub_laws;
mod memory_bus;
mod memory_sink;
pub mod processes;
pub mod report;
pub mod servers;
pub mod simulation;
pub mod source_laws;

pub use memory_bus::MemoryBus;
pub use memory_sink::MemorySink;
