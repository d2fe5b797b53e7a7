//! Decides which events of an ingest are new, which were stored before, and which conflict.

use std::collections::HashMap;
use std::sync::Arc;

use super::Ingested;
use crate::Event;

/// The fields that two events with the same id must share to be the same event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventIdentity {
    /// The event type as bytes. A row that another program inserted may have a type that is not UTF-8; such a row must
    /// not fail the batch.
    pub event_type: Vec<u8>,
    /// The payload, text or not.
    pub payload: Vec<u8>,
}

impl EventIdentity {
    fn is_of(&self, event: &Event) -> bool {
        self.event_type == event.event_type().as_bytes() && self.payload == event.payload().as_bytes()
    }
}

/// The result for each event of a batch, in order. `known` are the rows with the same ids that existed before the
/// batch.
pub fn deduplicate(batch: &[Arc<Event>], known: &HashMap<String, EventIdentity>) -> Vec<Ingested> {
    let mut firsts: HashMap<&str, &Event> = HashMap::new();
    let mut results = Vec::with_capacity(batch.len());
    for event in batch {
        let is_same = match (known.get(event.id()), firsts.get(event.id())) {
            (Some(row), _) => Some(row.is_of(event)),
            (None, Some(first)) => Some(
                first.event_type() == event.event_type() && first.payload().as_bytes() == event.payload().as_bytes(),
            ),
            (None, None) => None,
        };
        results.push(match is_same {
            None => Ingested::Stored,
            Some(true) => Ingested::Known,
            Some(false) => Ingested::Conflict,
        });
        firsts.entry(event.id()).or_insert(event);
    }
    results
}

/// The same for a batch that is stored whole or not at all.
pub fn deduplicate_atomic(batch: &[Arc<Event>], known: &HashMap<String, EventIdentity>) -> Vec<Ingested> {
    let mut results = deduplicate(batch, known);
    if results.contains(&Ingested::Conflict) {
        let stored = results.iter_mut().filter(|result| **result == Ingested::Stored);
        stored.for_each(|result| *result = Ingested::Withheld);
    }
    results
}
