use std::sync::Arc;

use async_trait::async_trait;

use crate::{Event, StoreError};

/// Ingests events, and records which event type owns which topic.
///
/// Two event types that differ only in `.` and `_` would share a topic. The first of them owns it. This table keeps the
/// owner across restarts.
///
/// # Laws
///
/// Each is a test of that name in `posthaste-backend-tests` (`hub_laws`).
///
/// - `the_same_event_again_is_known_and_another_with_its_id_is_a_conflict`: two events are the same if they have the
///   same id, type and payload.
/// - `an_atomic_batch_is_stored_whole_or_not_at_all`.
/// - `a_type_owns_its_topic_from_its_first_stored_event`: in the transaction that stores the event. A type without a
///   stored event owns no topic.
/// - `no_more_channels_are_recorded_than_the_limit`.
/// - `an_owner_survives_a_restart`.
/// - `a_paused_channel_stays_paused`: until it is resumed, also across restarts. Events of its type are stored.
///
/// For a pending outbox row that another program inserted, the type owns its topic as soon as `ingest` or `record`
/// first reads the row, even if the row is not due yet.
#[async_trait]
pub trait ChannelStore: Send + Sync + 'static {
    /// All recorded channels, oldest first.
    async fn load(&self) -> Result<Vec<RecordedChannel>, StoreError>;

    /// Records that an operator paused or resumed a channel. Returns false if no such channel is recorded.
    async fn set_paused(&self, event_type: &str, is_paused: bool) -> Result<bool, StoreError>;

    /// Records the channels of event types whose rows other programs inserted. Returns the results in the same order.
    async fn record(&self, event_types: Vec<String>) -> Result<Vec<Result<(), Refusal>>, StoreError>;

    /// Stores new events in the outbox and records the channels of their types, in one transaction. Returns the results
    /// in the same order. An `atomic` batch is stored whole or not at all.
    async fn ingest(&self, events: Vec<Arc<Event>>, atomic: bool) -> Result<Vec<Admission>, StoreError>;
}

/// A channel as the database has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedChannel {
    /// The event type.
    pub event_type: String,
    /// True if an operator paused it.
    pub is_paused: bool,
}

/// The result for one event of an ingest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Its type has a channel, so the event was stored or compared with the stored one.
    Ingested(Ingested),
    /// Its type gets no channel; nothing was stored.
    Refused(Refusal),
}

/// The result for an event whose type has a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ingested {
    /// It is in the outbox now.
    Stored,
    /// The same event was stored before.
    Known,
    /// Another event has its id. The stored event stays as it is.
    Conflict,
    /// It could have been stored, but another event of its atomic batch could not.
    Withheld,
}

/// Why an event type gets no channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Another event type owns the topic.
    TopicTaken {
        /// The type that owns the topic.
        owner: String,
    },
    /// The limit of channels is reached.
    Full {
        /// The limit.
        limit: usize,
    },
}
