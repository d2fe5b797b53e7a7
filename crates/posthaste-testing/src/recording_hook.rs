use std::sync::{Arc, Mutex, MutexGuard};

use posthaste_core::Event;
use posthaste_core::lock;
use posthaste_core::outbox::{HookError, WriterHook};

/// A writer hook that remembers its calls and their order.
///
/// Clones share the calls, so a test keeps one clone and gives another to the outbox.
#[derive(Clone, Default)]
pub struct RecordingHook(Arc<Mutex<Vec<HookCall>>>);

/// One call of a writer hook.
#[derive(Clone, Debug, PartialEq)]
pub enum HookCall {
    /// These events are about to be written.
    BeforeWrite(Vec<Event>),
    /// These events are inserted.
    AfterWrite(Vec<Event>),
    /// The transaction of these events committed.
    AfterCommit(Vec<Event>),
    /// The transaction of these events was rolled back, or its outcome is unknown.
    AfterRollback(Vec<Event>),
}

impl RecordingHook {
    /// A hook without calls.
    pub fn new() -> Self {
        Self::default()
    }

    /// Every call so far, in order.
    pub fn calls(&self) -> Vec<HookCall> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<HookCall>> {
        lock(&self.0)
    }
}

impl WriterHook for RecordingHook {
    fn before_write(&self, events: Vec<Event>) -> Result<Vec<Event>, HookError> {
        self.lock().push(HookCall::BeforeWrite(events.clone()));
        Ok(events)
    }

    fn after_write(&self, events: &[Event]) {
        self.lock().push(HookCall::AfterWrite(events.to_vec()));
    }

    fn after_commit(&self, events: &[Event]) {
        self.lock().push(HookCall::AfterCommit(events.to_vec()));
    }

    fn after_rollback(&self, events: &[Event]) {
        self.lock().push(HookCall::AfterRollback(events.to_vec()));
    }
}
