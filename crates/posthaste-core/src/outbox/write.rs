use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::hook::{HookError, WriterHook, call_hook};
use super::{InTransaction, Store, Table};
use crate::{Event, EventError, StoreError};

/// Why an event was not written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// It is not a valid event.
    #[error(transparent)]
    Event(#[from] EventError),
    /// The writer's hook refused it.
    #[error("the writer hook refused the events")]
    Hook(#[source] HookError),
    /// The database failed to insert it. The caller must roll the transaction back.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Writes events in a transaction, in this order, and returns the ids of what was written.
pub(super) async fn write_all<S: Store>(
    table: &Table<S>,
    hook: Option<&Arc<dyn WriterHook>>,
    transaction: &mut impl InTransaction<S>,
    mut events: Vec<Event>,
) -> Result<Vec<String>, WriteError> {
    if events.is_empty() {
        return Ok(Vec::new());
    }
    if let Some(hook) = hook {
        let before = catch_unwind(AssertUnwindSafe(|| hook.before_write(events)));
        events = match before {
            Ok(events) => events.map_err(WriteError::Hook)?,
            Err(_) => return Err(WriteError::Hook("the writer hook panicked before the write".into())),
        };
    }
    if events.is_empty() {
        return Ok(Vec::new());
    }
    let ids: Vec<String> = events.iter().map(|event| event.id().to_owned()).collect();
    // A transaction that another outbox began is treated like any other transaction of the service.
    match transaction.begun_by_outbox().filter(|begun| begun.is_of(table)) {
        Some(begun) => begun.write(events).await?,
        None => {
            let all: Vec<&Event> = events.iter().collect();
            table.store().insert(transaction.connection(), &all, None).await?;
            table.wrote(&events);
            if let Some(hook) = hook {
                call_hook("after_write", || hook.after_write(&events));
            }
        }
    }
    Ok(ids)
}
