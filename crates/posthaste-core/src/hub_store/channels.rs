use std::sync::Arc;

use async_trait::async_trait;

use crate::{Event, StoreError};

/// Which event type owns which topic, and the ingest of events, which records it.
///
/// Two event types that differ only in `.` and `_` would share a topic. The first of them owns it, and this table says which
/// one that was, also after a restart.
///
/// # Laws
///
/// Each is a test of that name in `posthaste-backend-tests` (`hub_laws`).
///
/// - `the_same_event_again_is_known_and_another_with_its_id_is_a_conflict`: two events are the same if they have the same id,
///   type and payload.
/// - `an_atomic_batch_is_stored_whole_or_not_at_all`.
/// - `a_type_owns_its_topic_from_its_first_stored_event`: in the transaction that stores the event. A type of which nothing
///   is stored owns nothing.
/// - `no_more_channels_are_recorded_than_the_limit`.
/// - `an_owner_survives_a_restart`.
///
/// A pending outbox row that another program inserted owns the topic of its type from the moment at which the row is first
/// seen, which is in `ingest` or in `record`, whether the row is due or not.
#[async_trait]
pub trait ChannelStore: Send + Sync + 'static {
    /// The event types of all recorded channels, oldest first.
    async fn load(&self) -> Result<Vec<String>, StoreError>;

    /// Records the channels of event types whose rows other programs inserted; answers in the same order.
    async fn record(&self, event_types: Vec<String>) -> Result<Vec<Result<(), Refusal>>, StoreError>;

    /// Stores new events in the outbox and records the channels of their types, in one transaction; answers in the same order.
    /// An `atomic` batch is stored whole or not at all.
    async fn ingest(&self, events: Vec<Arc<Event>>, atomic: bool) -> Result<Vec<Admission>, StoreError>;
}

/// The answer to one event of an ingest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Its type has a channel, and this is what became of the event.
    Ingested(Ingested),
    /// Its type gets no channel; nothing was stored.
    Refused(Refusal),
}

/// What became of an event whose type has a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ingested {
    /// It is in the outbox now.
    Stored,
    /// The same event was stored before.
    Known,
    /// Another event has its id; that one stays.
    Conflict,
    /// It could have been stored, but another event of its atomic batch could not.
    Withheld,
}

/// Why an event type gets no channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Another event type owns the topic.
    TopicTaken {
        /// That type.
        owner: String,
    },
    /// There are as many channels as there may be.
    Full {
        /// How many that is.
        limit: usize,
    },
}
