//! Suites of laws, in-memory fakes and fault injection: the proof of our own backends, and the test kit of a user.
//!
//! A backend is right when it passes the suite of its seam. Nothing here talks to a database but
//! [`servers`], which starts real ones. A service tests its events with a [`MemoryDatabase`] in place of its own.

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
