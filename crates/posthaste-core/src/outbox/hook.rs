use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::{BoxError, Event};

/// Why a hook refused a write.
pub type HookError = BoxError;

/// Code of the service that runs around its own writes: to enrich, refuse or count events, or to warm a cache.
///
/// Called in this order: `before_write`, the insert, `after_write`, and at the end of a transaction that
/// [`begin`](super::Outbox::begin) began, `after_commit` or `after_rollback`; the outbox cannot see the end of a
/// transaction that sqlx began. Each is called once for each call of `write` or `write_all`. They run in the caller's
/// task: keep them short.
pub trait WriterHook: Send + Sync + 'static {
    /// May replace the events; an empty list suppresses the write. An error aborts it and reaches the caller.
    fn before_write(&self, events: Vec<Event>) -> Result<Vec<Event>, HookError> {
        Ok(events)
    }

    /// The events are inserted. A panic here is logged and changes nothing.
    fn after_write(&self, events: &[Event]) {
        let _ = events;
    }

    /// The transaction has committed. A panic here is logged and changes nothing.
    fn after_commit(&self, events: &[Event]) {
        let _ = events;
    }

    /// The transaction was rolled back, or its outcome is unknown: if it did commit, the dispatcher finds its events. A
    /// panic here is logged and changes nothing.
    fn after_rollback(&self, events: &[Event]) {
        let _ = events;
    }
}

/// Calls a hook. A panic in it is logged and affects nothing else.
pub(super) fn call_hook(what: &'static str, call: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(call)).is_err() {
        tracing::error!(hook = what, "a writer hook panicked; nothing else is affected");
    }
}
