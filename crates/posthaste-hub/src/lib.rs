//! The services of Posthaste: ingest, channels, subscriptions, event processor, outbox processor, dead letters.
//!
//! Each service is one instance of the engine in `posthaste-core`; [`Hub::start`] puts them together, in the order of
//! the pipeline. The hub depends on no particular database: it runs on the stores that a
//! [`HubDatabase`](posthaste_core::hub_store::HubDatabase) opens.

mod attempt_log;
mod bus_status;
mod channel_status;
mod channels;
mod credentials;
mod dead_letters;
mod depths;
mod dlt_intake;
mod domains;
mod envelope;
mod event_processor;
mod event_status;
mod framed_bus;
mod health;
mod hub;
mod ingest;
mod lag;
mod lanes;
mod matching;
mod quarantine;
mod readiness;
mod registrations;
mod relays;
mod retention;
mod roles;
mod secrets;
mod settings;
mod sources;
mod stalls;
mod subscription_input;
mod supervisor;
mod topic_records;
mod topics;
mod watchdog;
mod watched;
mod webhook_dispatcher;

pub use channels::ChannelError;
pub use hub::{ChannelBus, ExternalBus, Hub, Parts, StartError};
pub use ingest::{Accepted, Ingest, IngestError};
pub use matching::{ActiveSubscription, SubscriptionIndex};
pub use posthaste_core::hub_store::{
    Created, DeadLetterCursor, DeadLetterFilter, DeadLetterSort, DeadLetterSortKey, DeadLetterStatus, PageRequest,
    QuarantineCursor, QuarantineFilter, QuarantineStatus, READ_RECORDS, RegistryError, SubscriptionFilter,
};
pub use readiness::{PartStatus, Readiness};
pub use registrations::{Listed, RegistrationError, Registrations, Versioned};
pub use roles::{Role, Roles, UnknownRole};
pub use secrets::{Sealer, SecretError};
pub use settings::{
    Acks, BusSettings, ChannelSettings, CleanupSettings, ClientSettings, Compatibility, Compression, DeliverySettings,
    DltSettings, IngestSettings, OutboxSettings, RegistryAuth, RetentionSettings, RoutingRule, RoutingSettings,
    Settings, SourceSettings, Violation,
};
pub use sources::{SourcePart, source_error};
pub use subscription_input::{SubscriptionReplacement, SubscriptionRequest};
