//! Suites of laws, in-memory fakes and fault injection: they prove our own backends and are a test kit for users.
//!
//! A backend is right when it passes the suite of its seam. Only [`servers`] uses real databases, which it starts
//! itself. A service tests its events with a [`MemoryDatabase`] in place of its own database.

#![warn(missing_docs)]

pub mod bus_laws;
pub mod hub_laws;
mod memory;
mod memory_bus;
mod memory_sink;
mod recording_hook;
pub mod servers;
pub mod simulation;
pub mod source_laws;

pub use memory::{MemoryConnection, MemoryDatabase, MemoryOutbox, MemoryTransaction};
pub use memory_bus::MemoryBus;
pub use memory_sink::MemorySink;
pub use recording_hook::{HookCall, RecordingHook};
