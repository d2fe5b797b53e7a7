//! The test kit of a service that uses the outbox: its events are tested with a [`MemoryDatabase`] in place of its own
//! database, and its writes with a [`RecordingHook`].

#![warn(missing_docs)]

mod memory;
mod recording_hook;

pub use memory::{MemoryConnection, MemoryDatabase, MemoryOutbox, MemoryTransaction};
#[doc(hidden)]
pub use memory::{MemoryTable, Row};
pub use recording_hook::{HookCall, RecordingHook};
