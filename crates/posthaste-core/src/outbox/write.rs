use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::hook::{HookError, WriterHook, shielded};
use super::{InTransaction, Store, Table};
use crate::{Event, EventError, StoreError};

/// Why an event was not written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// It is no event.
    #[error(transparent)]
    Event(#[from] EventError),
    /// The writer's hook refused it.
    #[error("the writer hook refused the events")]
    Hook(#[source] HookError),
    /// The database did not take it; the transaction is the caller's to roll back.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Writes events in a transaction, in this order, and answers with the ids of what was written.
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
    let (connection, notes) = transaction.parts();
    // A transaction that another outbox began is to this one like any other of the service.
    let notes = notes.filter(|notes| notes.is_of(table));
    let ids: Vec<String> = events.iter().map(|event| event.id().to_owned()).collect();
    match notes {
        None => {
            let all: Vec<&Event> = events.iter().collect();
            table.store().insert(connection, &all, None).await?;
            table.wrote(&events);
            if let Some(hook) = hook {
                shielded("after_write", || hook.after_write(&events));
            }
        }
        Some(notes) => {
            let mut permits: Vec<_> = events.iter().map(|event| notes.permit(event)).collect();
            let lock = notes.lock();
            notes.begin_write(&ids);
            let mut from = 0;
            // Numbers follow the order of the events, so claimed and unclaimed ones go in as they alternate.
            while from < events.len() {
                let is_hot = permits[from].is_some();
                let count = permits[from..].iter().take_while(|permit| permit.is_some() == is_hot).count();
                let part: Vec<&Event> = events[from..from + count].iter().collect();
                let lock = lock.as_deref().filter(|_| is_hot);
                let rows = table.store().insert(connection, &part, lock).await?;
                for ((seq, event), permit) in rows.into_iter().zip(part).zip(&mut permits[from..]) {
                    match permit.take() {
                        Some(permit) => notes.born_claimed(seq, event, permit),
                        None => notes.born_unclaimed(seq, event),
                    }
                }
                from += count;
            }
            if let Some(hook) = hook {
                shielded("after_write", || hook.after_write(&events));
            }
            notes.end_write(events);
        }
    }
    Ok(ids)
}
