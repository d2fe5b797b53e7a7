//! Suites of laws, in-memory fakes and fault injection: the proof of our own backends, and the test kit of a user.
//!
//! A backend is right when it passes the suite of its seam. Nothing here talks to a database but
//! [`servers`], which starts real ones.

pub mod bus_laws;
mod memory;
mod memory_bus;
mod memory_sink;
pub mod servers;
pub mod simulation;
pub mod source_laws;

pub use memory::{MemoryItem, MemoryRow, MemorySource, MemoryStatus, MemoryStore};
pub use memory_bus::MemoryBus;
pub use memory_sink::MemorySink;
